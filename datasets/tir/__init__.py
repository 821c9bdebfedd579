"""Scheduled tensor programs: networks to tasks, tasks to programs, programs to latencies (TVM)."""
