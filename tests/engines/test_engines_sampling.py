"""Sampling on the local engine: shared prompts, refill, requests that join, and the contract on seeds."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import make
from support.patience import LONG
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted
from workbench.engines import Request, Sample, SamplingSettings, local
from workbench.engines.local_engine import caches
from workbench.engines.local_engine import sampling as decoding
from workbench.engines.local_engine.sampling import HeldRows, Wave, Waves, casts_kept, decode, keep_allowed
from workbench.testing.engines import EngineContract, LikelihoodLoss

EDGE = 1e-5


class Counted:
    """Counts decode steps and prefilled tokens, and calls `at(number)` before each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: Any = None) -> None:
        self.steps, self.rows, self.prefilled = 0, 0, 0
        step, prefill = caches.SharedPrefix.step, caches.SharedPrefix._prefill

        def counted(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.rows += len(tokens)
            if at is not None:
                at(self.steps)
            return step(cache, tokens)

        def filled(cache: Any, prompts: Any) -> None:
            self.prefilled += sum(map(len, prompts.values()))
            prefill(cache, prompts)

        monkeypatch.setattr(caches.SharedPrefix, "step", counted)
        monkeypatch.setattr(caches.SharedPrefix, "_prefill", filled)


def mixed(count: int = 16) -> list[Request]:
    """Requests of several prompts, lengths and settings."""
    prompts = [(1, 5, 9, 7), (1, 8, 3), (4,), (1, 5, 9, 7, 11, 2, 8, 30, 31, 32, 33, 34)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 7}, {"temperature": 0.0}]
    chosen = random.Random(3)
    return [
        Request(
            chosen.choice(prompts),
            SamplingSettings(max_tokens=chosen.randint(1, 24), ignore_eos=bool(n % 3), **kinds[n % len(kinds)]),
            n,
        )
        for n in range(count)
    ]


# --- the cache ----------------------------------------------------------------------------------


def played(model: Any, path: str, seed: int) -> float:
    """Rows come, go and change seats at random; the largest difference of a logit from the model's own forward."""
    chosen, worst = random.Random(seed), 0.0
    pool = [tuple(chosen.randint(3, 56) for _ in range(length)) for length in (1, 2, 7, 7, 12)]
    rows: list[list[int]] = []
    with torch.no_grad(), caches.cache_of(model, path, 16) as cache:
        given = []
        for turn in range(6):
            stay = (
                [seat for seat in range(len(rows)) if chosen.random() < 0.8]
                if turn % 3 == 0
                else list(range(len(rows)))
            )
            entering = (
                [chosen.choice(pool) for _ in range(chosen.choice((0, 1, 6)) if rows else 5)] if turn % 2 == 0 else []
            )
            if not stay and not entering:
                continue
            order = [*stay, *[0] * len(entering)]
            if chosen.random() < 0.5:  # who enters takes a seat between the others
                order = sorted(order, reverse=True)
                seats = chosen.sample(range(len(order)), len(entering))
                kept = iter(stay)
                order = [0 if seat in seats else next(kept) for seat in range(len(order))]
            else:
                seats = list(range(len(stay), len(order)))
            prompts = dict(zip(seats, entering, strict=True))
            rows = [list(prompts[seat]) if seat in prompts else rows[of] for seat, of in enumerate(order)]
            cache.seat(order, prompts)
            for _ in range(chosen.choice((1, 3))):
                logits = cache.step(torch.tensor([row[-1] for row in rows]))
                given += [(tuple(row), one.float()) for row, one in zip(rows, logits, strict=True)]
                for row in rows:
                    row.append(chosen.randint(3, 56))
    longest = max(len(ids) for ids, _ in given)
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in given])  # on the right: no token sees it
    with torch.no_grad():
        own = model(input_ids=padded, use_cache=False).logits.float()
    for (ids, logits), one in zip(given, own, strict=True):
        worst = max(worst, float((one[len(ids) - 1] - logits).abs().max() / one[len(ids) - 1].abs().max()))
    return worst


SHAPES = ("qwen2", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
"""Plain, windows, soft-caps, sinks, values of another width."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_shared_prompts_give_the_models_own_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_FIRST", 2)  # buffers grow, too
    engine = local(make(name, tmp_path / "model"), device="cpu", self_check=False)
    paths = [caches.SHARED, *[caches.LEAN] * (name in ("qwen2", "mistral"))]
    for path in paths:
        assert max(played(engine._model, path, seed) for seed in range(2)) < 1e-4


@pytest.mark.slow
def test_prompts_are_prefilled_once_and_stay_while_rows_use_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    settings = SamplingSettings(max_tokens=4, ignore_eos=True)
    requests = [Request(ids, settings, n) for ids in ((1, 5, 9, 7), (1, 8, 3)) for n in range(8)]
    local(folder, max_wave=4, self_check=False, decode="lean").sample_many(
        requests
    )  # four at a time, all of one length
    assert counted.prefilled == 3 + 2  # the last token of a prompt is the first that is decoded
    assert counted.steps == 4 * 4


@pytest.mark.slow
def test_few_prompts_with_very_many_rows(folder: Path) -> None:
    settings = SamplingSettings(max_tokens=3, ignore_eos=True)
    requests = [Request((1, 5, 9, 7), settings, n) for n in range(30)] + [
        Request((1, n, 3), settings, n) for n in range(4, 12)
    ]
    one, other = (local(folder, decode=way).sample_many(requests) for way in ("lean", "own cache"))
    assert [sample.ids for sample in one] == [sample.ids for sample in other]


# --- which way is taken -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_lean_step_is_taken_where_it_is_proven_alone(folder: Path, tmp_path: Path) -> None:
    assert local(folder).selfcheck.paths.decode == "lean"
    assert local(folder, decode="own cache").selfcheck.paths.decode == "own cache"
    granite = local(make("granite", tmp_path / "granite"))  # the parts of Llama, and scales that they do not show
    assert granite.selfcheck.paths.decode == "shared prompts" and "lean" not in granite.selfcheck.found
    assert "lean" not in local(make("gemma2", tmp_path / "gemma2")).selfcheck.found
    with pytest.raises(EngineError, match="lean"):
        local(tmp_path / "granite", decode="lean")


@pytest.mark.slow
def test_what_was_learned_is_sampled_at_once(folder: Path) -> None:
    engine = local(folder, lr=1e-2, decode="lean")
    batch = EngineContract().batch(engine)
    engine.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    batch = EngineContract().batch(engine)
    found = engine.compute_log_probs(batch)["log_probs"]
    torch.testing.assert_close(batch["rollout_log_probs"], found, atol=2e-5, rtol=0)


# --- the contract on seeds ----------------------------------------------------------------------


def edge(model: Any, request: Request, ids: tuple[int, ...]) -> float:
    """How far the draw of the last of `ids` lies from the nearest edge of the whole CDF in float64."""
    given = torch.tensor([[*request.ids, *ids[:-1]]])
    with torch.no_grad():
        weights = torch.softmax(model(input_ids=given).logits[0, -1].double() / request.settings.temperature, -1)
    kept = weights[None].float()
    keep_allowed(kept, request.settings)
    weights = torch.where(kept[0] > 0, weights, 0)
    weights /= weights.sum()
    uniforms = torch.rand(len(ids), generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
    return float((weights.cumsum(-1) - uniforms[-1]).abs().min())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lean", "shared prompts", "own cache"])
def test_company_changes_a_token_only_where_its_draw_lies_at_an_edge(folder: Path, way: str) -> None:
    requests, differing = mixed(), 0
    engine, small = local(folder, decode=way), local(folder, decode=way, max_wave=5)
    alone = [engine.sample_many([request])[0] for request in requests]
    for company in (engine.sample_many(requests), small.sample_many(requests), small.sample_many(requests[::-1])[::-1]):
        for request, one, other in zip(requests, alone, company, strict=True):
            first = next((n for n, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b), None)
            if first is not None:
                differing += 1
                assert edge(engine._model, request, one.ids[: first + 1]) < EDGE
            else:
                assert one.ids == other.ids and one.finish_reason == other.finish_reason
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert differing <= 2  # of 48 rows


@pytest.mark.slow
def test_the_same_requests_together_give_the_same_bits(folder: Path) -> None:
    engine = local(folder, max_wave=5)
    assert engine.sample_many(mixed()) == engine.sample_many(mixed())


def test_penalty_and_least_length_are_those_of_transformers(folder: Path) -> None:
    """Greedy tokens are those of transformers' own `generate`; log-probs stay those of the policy."""
    engine = local(folder)
    prompt = (1, 5, 9, 7)
    for mine, theirs in (
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.8, "min_tokens": 9}, {"repetition_penalty": 0.8, "min_new_tokens": 9}),
    ):
        settings = SamplingSettings(temperature=0, max_tokens=12, **mine)
        sample = engine.sample_many([Request(prompt, settings, 0)])[0]
        plain = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
        found = engine._model.generate(torch.tensor([prompt]), **plain, **theirs)[0, len(prompt) :]
        assert list(sample.ids) == found.tolist()
        with torch.no_grad():
            logits = engine._model(torch.tensor([[*prompt, *sample.ids]])).logits[0, len(prompt) - 1 : -1]
        policys = logits.log_softmax(-1).gather(-1, found[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(sample.log_probs), policys, atol=2e-5, rtol=0)


def test_stop_tokens_and_least_length(folder: Path) -> None:
    engine = local(folder)

    def ids(**settings: Any) -> tuple[tuple[int, ...], str]:
        chosen = SamplingSettings(**{"max_tokens": 12, "ignore_eos": True, **settings})
        sample = engine.sample_many([Request((1, 5, 9, 7), chosen, 3)])[0]
        return sample.ids, sample.finish_reason

    free, _ = ids()
    assert ids(stop_token_ids=(free[4],)) == (free[: free.index(free[4]) + 1], "stop")
    held, _ = ids(stop_token_ids=(free[4],), min_tokens=8)
    assert len(held) > 8 and free[4] not in held[:8]
    ended = ids(stop_token_ids=tuple(range(64)), min_tokens=0)
    assert ended == (free[:1], "stop")
    with pytest.raises(EngineError, match="stop_token_ids of a request; expected token ids from 0 to 63"):
        ids(stop_token_ids=(64,))


def test_the_likeliest_tokens_are_those_of_the_policy(folder: Path) -> None:
    engine = local(folder)
    settings = SamplingSettings(temperature=0.7, top_k=2, repetition_penalty=1.5, max_tokens=6, ignore_eos=True)
    wanted, plain = engine.sample_many([Request((1, 5, 9, 7), settings, 3, tops=n) for n in (3, 0)])
    assert wanted == plain and plain.tops == () and len(wanted.tops) == 6
    with torch.no_grad():
        logits = engine._model(torch.tensor([[1, 5, 9, 7, *wanted.ids]])).logits[0, 3:-1] / 0.7
    values, ids = logits.log_softmax(-1).topk(3)
    assert [list(one) for one in wanted.tops] == ids.tolist()
    found = torch.tensor([list(one.values()) for one in wanted.tops])
    torch.testing.assert_close(found, values, atol=2e-5, rtol=0)


@pytest.mark.parametrize("ids", [(), (1, 64), (-1, 5)])
def test_a_prompt_that_the_model_cannot_read_is_refused_alone(folder: Path, ids: tuple[int, ...]) -> None:
    engine = local(folder, self_check=False)

    async def asked() -> list[Any]:
        settings = SamplingSettings(max_tokens=2)
        each = [engine.sample(Request(one, settings, 0)) for one in ((1, 5), ids)]
        return list(await asyncio.gather(*each, return_exceptions=True))

    good, bad = runtime.run(asked())
    assert isinstance(good, Sample) and isinstance(bad, EngineError) and "token ids from 0 to 63" in str(bad)


@pytest.mark.slow
def test_long_rows_go_on_with_the_numbers_of_their_seed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request((1, 5, 9), SamplingSettings(max_tokens=50, ignore_eos=True), 4)
    whole = local(folder, self_check=False, decode="lean").sample_many([request])
    monkeypatch.setattr(decoding, "_FIRST", 3)
    assert local(folder, self_check=False, decode="lean").sample_many([request]) == whole


# --- refill -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_enter_as_others_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    lengths = [30, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    requests = [
        Request((1, 5, n), SamplingSettings(max_tokens=length, ignore_eos=True), n)
        for n, length in enumerate(lengths, 4)
    ]
    samples = local(folder, max_wave=4, self_check=False, decode="shared prompts").sample_many(requests)
    assert [len(sample.ids) for sample in samples] == lengths
    assert counted.steps == 30  # waves of four: 30 + 3 + 3 + 3
    assert counted.rows < 100  # seats that nobody takes are given up


def test_a_request_joins_a_wave_that_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Any] = []
    order: list[str] = []

    async def ask(name: str, tokens: int) -> Sample:
        found = await engine.sample(Request((1, 5, 9), SamplingSettings(max_tokens=tokens, ignore_eos=True), tokens))
        order.append(name)
        return found

    def at(step: int) -> None:
        if step == 5:
            late.append(asyncio.run_coroutine_threadsafe(ask("late", 10), runtime.loop()))
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), runtime.loop()).result()  # it stands in the queue

    counted = Counted(monkeypatch, at)
    engine = local(folder, self_check=False, decode="lean")
    first = runtime.run(ask("first", 60))
    assert len(first.ids) == 60 and len(late[0].result(timeout=LONG).ids) == 10
    assert order == ["late", "first"] and counted.steps == 60


def test_nobody_joins_once_the_weights_have_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local(folder, max_wave=1, self_check=False, decode="lean")
    versions = []

    def at(step: int) -> None:
        if step == 2:
            engine.version, engine.state_id = 1, "other"

    Counted(monkeypatch, at)
    settings = SamplingSettings(max_tokens=4, ignore_eos=True)
    versions = [one.version for one in engine.sample_many([Request((1, 5), settings, n) for n in range(2)])]
    assert versions == [0, 1]


# --- waves --------------------------------------------------------------------------------------


def test_who_gives_up_takes_nobody_along() -> None:
    entered: list[list[int]] = []

    async def asked() -> tuple[list[int], int]:
        going = asyncio.Event()
        loop = asyncio.get_running_loop()

        def answer(wave: Wave[int, int]) -> None:
            entered.append(list(wave.questions))
            if wave.questions == [1, 2]:
                loop.call_soon_threadsafe(going.set)
                while True:  # until nobody waits
                    wave.join(4)
            for place, question in enumerate(wave.questions):
                wave.finish(place, 10 * question)

        waves: Waves[int, int] = Waves(answer, 2, "test")
        given_up = [asyncio.ensure_future(waves.ask(question)) for question in (1, 2)]
        await going.wait()
        for one in given_up:
            one.cancel()
        return list(await asyncio.gather(*(waves.ask(question) for question in (3, 4)))), len(waves._waiting)

    assert runtime.run(asked()) == ([30, 40], 0)
    assert entered == [[1, 2], [3, 4]]


def test_an_error_is_raised_for_those_who_joined_too() -> None:
    def answer(wave: Wave[int, int]) -> None:
        assert wave.join(1) == {2: 3}
        wave.finish(0, 1)
        wave.finish(1, KeyError("alone"))
        raise ValueError("all that wait")

    async def asked() -> list[Any]:
        waves: Waves[int, int] = Waves(answer, 2, "test")
        return list(await asyncio.gather(*(waves.ask(question) for question in (1, 2, 3)), return_exceptions=True))

    found = runtime.run(asked())
    assert found[0] == 1 and isinstance(found[1], KeyError) and isinstance(found[2], ValueError)


@pytest.mark.slow
def test_an_interrupt_stops_a_wave_between_two_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, lambda step: runtime.interrupt() if step == 3 else None)
    engine = local(folder, self_check=False, decode="lean")
    try:
        with pytest.raises(Interrupted):
            engine.sample_many(mixed(4))
    finally:
        runtime.clear()
    assert counted.steps == 3
    assert engine.sample_many(mixed(4)) == local(folder, decode="lean").sample_many(mixed(4))


@pytest.mark.slow
def test_an_interrupt_stops_a_wave_whose_prompts_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, layers = local(folder, self_check=False, decode="lean"), list[int]()
    attend = caches.SharedPrefix.attend

    def stopped(self: Any, layer: Any) -> torch.Tensor:
        layers.append(layer.index)
        runtime.interrupt()
        return attend(self, layer)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(caches.SharedPrefix, "attend", stopped)
        try:
            engine.sample_many(mixed(4))
        finally:
            runtime.clear()
    assert layers == [0], "no further layer"
    assert engine.sample_many(mixed(4)) == local(folder, decode="lean").sample_many(mixed(4))


# --- half precision -----------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts casts of a model's weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weights = {one.data_ptr() for one in model.parameters() if one.dim() > 1}
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("way", ["shared prompts", "own cache"])
def test_weights_are_cast_once_a_wave(folder: Path, way: str, lora_rank: int) -> None:
    engine = local(folder, dtype="bfloat16", lora_rank=lora_rank, self_check=False, decode=way)
    wave: Any = Waiting([Request((1, 5, 9), SamplingSettings(max_tokens=6, ignore_eos=True), 0)])
    frozen = [one for one in engine._model.parameters() if not one.requires_grad]
    within = engine._autocast(), casts_kept(engine._model), caches.cache_of(engine._model, way, 99)
    with within[0], within[1], within[2] as cache, Casts(engine._model) as casts:
        decode(cache, HeldRows(frozenset(), engine.tokenizer), wave, 0, 1)
    assert 0 < casts.count <= len(casts.weights) and len(wave.answers[0].ids) == 6
    assert not any(one.requires_grad for one in frozen) and bool(frozen) == bool(lora_rank)


class Waiting:
    """A wave that nobody joins."""

    def __init__(self, questions: list[Request]) -> None:
        self.questions = questions
        self.answers: dict[int, Sample] = {}

    def finish(self, place: int, answer: Sample) -> None:
        """Keep the answer."""
        self.answers[place] = answer

    def join(self, most: int) -> dict[int, Request]:
        """Nobody."""
        return {}


@pytest.mark.parametrize("shape", [(3, 1, 64, 5), (24, 3, 64, 100), (2, 48, 128, 333), (5, 7, 16, 31)])
def test_scores_of_a_decode_step_in_bfloat16_are_the_products_of_queries_and_keys(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batch, queries, width, keys = shape
    query, buffer = torch.randn(batch, queries, width).bfloat16(), torch.randn(batch, 512, width).bfloat16()
    key = buffer[:, 2 : 2 + keys]
    found = caches._scores(query, key)
    assert torch.equal(found, torch.bmm(query, key.transpose(1, 2))) and found.is_contiguous()
