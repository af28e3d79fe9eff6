"""A lam that keeps so many entries competing while scores spread."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import sparsetopk.torch as st
from sparsetopk.torch._modules import _Counted
from sparsetopk.torch.nn import (
    ExpertChoice,
    RunningLam,
    TokenChoice,
    TokenSelector,
    TopK,
    TopKAttention,
    TopKMag,
    TopKMask,
    TopKSelect,
    TopKSign,
)

OPERATORS = [
    (TopKMask, st.topk_mask),
    (TopK, st.topk),
    (TopKMag, st.topk_mag),
    (TopKSign, st.topk_sign),
]


def competing(y, x, is_mask):
    return ((y != 0) & (y.abs() != (1.0 if is_mask else x.abs()))).double().sum(-1).mean().item()


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize(("module", "operator"), OPERATORS, ids=lambda each: each.__name__)
def test_so_many_compete_whatever_the_scale(module, operator, straight_through):
    torch.manual_seed(0)
    x = torch.randn(64, 100, dtype=torch.float64)
    layer = module(10, RunningLam(8.0, start=5.0), straight_through=straight_through)
    for scale in (1.0, 7.0):  # the scores spread
        for _ in range(30):
            layer(scale * x)
        lam = layer.lam.value.item()
        y = operator(scale * x, 10, lam)
        assert abs(competing(y, scale * x, module in (TopKMask, TopKSign)) - 8) < 0.5
    before = layer.lam.value
    layer.eval()(x)
    assert layer.lam.value == before
    assert "lam=RunningLam(target=8)" in repr(layer)


@pytest.mark.parametrize(
    "router", [ExpertChoice(5, RunningLam(3.0)), TokenChoice(2, RunningLam(3.0, 0.01))]
)
def test_routers(router):
    torch.manual_seed(0)
    logits = torch.randn(6, 40, 8)
    for _ in range(40):
        router(logits)
    by_row = logits.mT if isinstance(router, ExpertChoice) else logits
    y = st.topk_mask(by_row, router.k, router.lam.value)
    assert abs(competing(y, by_row, True) - 3) < 0.3


def test_training_goes_on_from_a_state_dict_and_the_target_moves():
    torch.manual_seed(0)
    xs = torch.randn(20, 32, 100)

    def make():
        return TopKMask(10, RunningLam(16.0, final=4.0, steps=10))

    whole, first, second = make(), make(), make()
    for x in xs:
        whole(x)
    for x in xs[:7]:
        first(x)
    second.load_state_dict(first.state_dict())
    for x in xs[7:]:
        second(x)
    assert torch.equal(whole.lam.value, second.lam.value)
    targets = [RunningLam(16.0, final=4.0, steps=10) for _ in range(3)]
    for lam, step in zip(targets, (0, 5, 99), strict=True):
        lam.step.fill_(step)
    assert [round(lam.current_target.item(), 5) for lam in targets] == [16.0, 8.0, 4.0]


def test_one_graph_and_gradients():
    torch.manual_seed(0)
    x = torch.randn(8, 50, requires_grad=True)
    layer, other = TopKMask(5, RunningLam(6.0)), TopKMask(5, RunningLam(6.0))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        y, expected = compiled(x), other(x)
        torch.testing.assert_close(y, expected)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(layer.lam.value, other.lam.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0}, "target must be finite and greater than 0, got 0"),
        ({"start": float("inf")}, "start must be finite"),
        ({"final": 2.0}, "final and steps go together"),
        ({"final": 2.0, "steps": 0}, "steps must be"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        RunningLam(**options)


def test_auto_is_a_running_lam_and_short_rows_are_not_asked_for_more_than_they_have():
    layer = TokenSelector(2, 4, "auto", scorer=torch.nn.Linear(4, 1, bias=False))
    assert "lam=RunningLam(target=8)" in repr(layer)
    x = torch.randn(50, 6, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(200):
        layer(x)
    assert layer.lam.value < 100  # 8 of 6 tokens would have taken it to 1e7
    assert 3.5 < layer.statistics()["competing"] < 5.5
    with pytest.raises(
        ValueError, match="lam must be a number, a tensor, a RunningLam or 'auto', got"
    ):
        TopKMask(3, "running")


HARD = (1e-6, "0 of 20 entries compete on average of 50 rows with lam=1e-06; it is hard in effect")
ALL = (1e3, "20 of 20 entries compete on average of 50 rows with lam=1000; take a smaller lam")


@pytest.mark.parametrize(
    ("make", "lam", "message"),
    # the largest magnitudes stand alone at any lam
    [(TopKMask, *HARD), (TopK, *HARD), (TopKMag, *HARD), (TopKMask, *ALL), (TopK, *ALL)],
)
@pytest.mark.parametrize("straight_through", [False, True])
def test_a_lam_that_teaches_nothing_is_said_once(make, lam, message, straight_through):
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    layer = make(3, lam, straight_through=straight_through, hard_eval=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.eval()(x)
        layer.train()(x[:2])  # may be chance
        make(3, 0.1)(x)
        make(3, 0.0)(x)
    with pytest.warns(UserWarning, match=message):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)


def test_a_selector_says_that_nothing_competes():
    x = torch.randn(50, 20, 4)
    with pytest.warns(UserWarning, match="TokenSelector: 0 of 20 entries compete"):
        TokenSelector(3, 4, 1e-6)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenSelector(3, 4, 1.0)(x)
        TopKAttention(4, 2, 3)(x)


def test_hardly_any_is_said_too():
    x = torch.arange(20.0).repeat(50, 1)
    x[0, 16] += 0.999  # one of 50 rows has two that compete
    with pytest.warns(UserWarning, match="TopKMask: 0.04 of 20 entries compete"):
        TopKMask(3, 0.01)(x)


STATISTICS = [
    (lambda: TopKMask(3, 2.5), 2),
    (lambda: TopKMask(3, 2.5, straight_through=True), 2),
    (lambda: TopK(3, 2.5), 2),
    (lambda: TopKMask(3, 2.5, largest=False), 2),
    (lambda: TopKSelect(3, 2.5), 2),
    (lambda: TopKSelect(3, 2.5, values="x", capacity=3), 2),
    (lambda: TokenSelector(3, 1, 2.5, scorer=torch.nn.Identity()), 2),
]


@pytest.mark.parametrize(("make", "expected"), STATISTICS)
def test_what_competes_is_counted_now_and_then(make, expected):
    layer = make()
    x = torch.arange(20.0)
    x = x.repeat(10, 1, 1).mT if isinstance(layer, TokenSelector) else x.repeat(10, 1)
    assert layer.statistics() == {}
    layer.eval()(x)
    assert layer.statistics() == {}
    layer.train()(x)
    assert {name: v.item() for name, v in layer.statistics().items()} == pytest.approx(
        {"competing": expected, "share": expected / 20}
    )
    for _ in range(99):
        layer(x / 5)
    assert layer.statistics()["competing"] == expected
    layer(x / 5)  # the 101st
    assert layer.statistics()["competing"] > expected


@pytest.mark.parametrize(
    "make",
    [lambda lam: TokenSelector(3, 8, lam), lambda lam: TopKAttention(8, 2, 3, lam, chunk=16)],
)
def test_what_competes_is_counted_among_all_and_not_in_slots_alone(make):
    layer, x = make(1e9), torch.randn(2, 40, 8)
    x = x.repeat(8, 1, 1)
    with pytest.warns(UserWarning, match="40 of 40 entries compete on average"):
        layer(x)
    assert layer.slots(40) < 40
    assert layer.statistics()["share"] == 1.0


def test_no_mask_is_looked_at_between_counts_or_in_a_graph(monkeypatch):
    seen = []
    monkeypatch.setattr(
        TopKMask, "_judge", lambda self, counted: seen.append(counted.competing.item())
    )
    x, layer, compiled = torch.randn(10, 20), TopKMask(3), TopKMask(3)
    layer._judged = True
    for _ in range(201):
        layer(x)
    assert len(seen) == 3
    graph = torch.compile(compiled, fullgraph=True, backend="eager")
    graph(x)
    assert compiled.statistics() == {}
    torch.func.vmap(compiled)(x)
    assert compiled.statistics() == {}


def test_on_another_device_the_warning_comes_with_the_statistics():
    x = torch.randn(50, 20)
    layer = TopKMask(3, 1e-6)
    layer._counted = _Counted(torch.tensor(0), 50, 20, 1e-6)  # what a GPU would have left
    with pytest.warns(UserWarning, match="TopKMask: 0 of 20 entries compete"):
        layer.statistics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)


def test_a_running_lam_for_slots():
    torch.manual_seed(0)
    x = torch.randn(64, 100)
    layer = TopKSelect(10, RunningLam(8.0, start=5.0), capacity=12)
    for _ in range(30):
        layer(x)
    assert abs(competing(st.topk_mask(x, 10, layer.lam.value), x, True) - 8) < 0.5
