"""What a search keeps goes with the search."""

import gc
import weakref

import pytest

import foreplan
from foreplan.planner import api
from foreplan.planner.cached_method import cached_method

ENCODER = {"name": "v", "tokens": 64, "dims": {"layers": 2, "hidden": 256, "heads": 4}}
BUBBLES = {
    "encoders": [ENCODER], "backbone": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000},
    "sequence_length": 128, "microbatches": 4,
}  # fmt: skip
PLANS = {
    "serving": (
        "tiny-llama-random",
        "1xl4,1xt4",
        {"batch": 2, "prompt_tokens": 8, "new_tokens": 4},
    ),
    "replicas": (
        "tiny-llama-random",
        "1xl4@a,1xt4@b",
        {"batch": 2, "prompt_tokens": 8, "new_tokens": 4},
    ),
    "precision": (None, "1xl4,1xt4", {"network": "digits_mlp", "batch": 4}),
    "bubbles": (None, "2xl4", BUBBLES),
}


class Counted:
    def __init__(self):
        self.calls = []

    @cached_method
    def double(self, x, *, of=1):
        """Twice."""
        self.calls.append((x, of))
        return None if x is None else 2 * x * of


def test_each_object_computes_once_for_each_arguments():
    one, other = Counted(), Counted()
    assert [one.double(3), one.double(3), one.double(3, of=2), one.double(None)] == [6, 6, 12, None]
    assert one.double(None) is None
    assert other.double(3) == 6
    assert one.calls == [(3, 1), (3, 2), (None, 1)]
    assert Counted.double.__doc__ == "Twice."


def test_the_object_goes_when_its_last_user_does():
    one = Counted()
    one.double(3)
    seen = weakref.ref(one)
    gc.disable()  # at once, not when the collector comes
    try:
        del one
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_keeps_no_prices_of_its_search(kind, monkeypatch):
    # PuLP keeps the exceptions of its own import, and with them the frames of whoever imports it.
    pytest.importorskip("pulp")
    books = []
    of = api.cost_book

    def watched(*args, **kwargs):
        books.append(weakref.ref(book := of(*args, **kwargs)))
        return book

    monkeypatch.setattr(api, "cost_book", watched)
    model, cluster, workload = PLANS[kind]
    plan = foreplan.plan(kind, model, cluster, workload, costs="roofline")
    gc.collect()
    assert books
    assert [book() for book in books] == [None] * len(books)
    assert plan.kind == kind
