"""Sources of prices that a `CostBook` asks in turn, each for what it knows."""
