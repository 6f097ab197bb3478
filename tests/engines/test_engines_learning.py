"""Learning: nothing is dropped out but what adapters ask for; the optimizer's state is as plain as it was; heads of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.dataproto import DataProto
from workbench.engines import LocalSettings, local
from workbench.engines.local_engine import scoring
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.local_engine.forward import head_of
from workbench.engines.local_engine.learning import Optimizer
from workbench.testing.engines import EngineContract, LikelihoodLoss


@pytest.fixture(scope="module")
def batch(folder: Path) -> DataProto:
    contract = EngineContract()
    return contract.batch(local(folder, device="cpu"))


def seen(engine: Any, batch: DataProto) -> torch.Tensor:
    """The log-probs that a loss gets while learning."""
    found: torch.Tensor = engine.probe(batch, LikelihoodLoss(), EngineContract.counts(batch)).columns["seen"]
    return found


@pytest.mark.parametrize("kind", ["GPT2", "OPT"])
@pytest.mark.parametrize("again", [False, True])
def test_a_models_own_dropout_is_off_while_learning(kind: str, again: bool, batch: DataProto) -> None:
    import transformers

    torch.manual_seed(0)
    if kind == "GPT2":  # dropout 0.1 by default
        config: Any = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:  # its layers drop out by a number of their own
        small = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.OPTConfig(vocab_size=64, word_embed_proj_dim=32, max_position_embeddings=64, **small)
        model = transformers.OPTForCausalLM(config)
    settings = LocalSettings(gradient_checkpointing=again, device="cpu")
    engine = LocalEngine(model.eval(), None, settings)
    old = engine.compute_log_probs(batch)["log_probs"]
    torch.testing.assert_close(seen(engine, batch), old, atol=1e-6, rtol=0)
    assert not any(part.training for part in model.modules())
    if kind == "OPT":
        assert model.model.decoder.layers[0].dropout == 0.1  # as it was


@pytest.mark.slow
def test_adapters_drop_out_where_they_are_told_to(folder: Path, batch: DataProto) -> None:
    pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    engine = local(folder, device="cpu", lora_rank=4, lora_dropout=0.5, lr=1e-2)
    for _ in range(2):
        engine.learn(batch, LikelihoodLoss(), EngineContract.counts(batch))
    assert not torch.equal(seen(engine, batch), seen(engine, batch))
    one, two = (engine.compute_log_probs(batch)["log_probs"] for _ in range(2))
    assert torch.equal(one, two)


class TestOptimizer:
    def make(self, **settings: Any) -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
        torch.manual_seed(0)
        named = {"a": torch.nn.Parameter(torch.randn(4, 3)), "b": torch.nn.Parameter(torch.randn(5))}
        return named, Optimizer(named, LocalSettings(lr=0.1, weight_decay=0.1, **settings))

    def step(self, named: dict[str, torch.nn.Parameter], number: int) -> None:
        for parameter in named.values():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (number + 1)

    def test_it_is_adamw(self) -> None:
        named, optimizer = self.make()
        before = {name: one.detach().clone() for name, one in named.items()}
        self.step(named, 0)
        optimizer.step()
        for name, one in named.items():  # the first step is lr long wherever there is a gradient
            grad = torch.linspace(-1, 1, one.numel()).reshape(one.shape)
            expected = before[name] * (1 - 0.1 * 0.1) - 0.1 * grad / (grad.abs() + 1e-8)
            torch.testing.assert_close(one.detach(), expected)

    def test_offloaded_moments_come_one_parameter_at_a_time_and_change_no_bit(self, monkeypatch: Any) -> None:
        away: set[int] = set()  # parameters whose moments are in host memory; a real GPU: tests/gpu
        (plain, one), (offloaded, two) = self.make(), self.make(offload="optimizer")
        move = two._move

        def moved(parameters: Any, device: str | None) -> None:
            (away.update if device == "cpu" else away.difference_update)(map(id, parameters))
            move(parameters, device)

        monkeypatch.setattr(two, "_move", moved)
        seen: list[tuple[int, int]] = []
        two._adam.register_step_pre_hook(lambda adam, *_: seen.append((len(adam.param_groups[0]["params"]), len(away))))
        for number in range(3):
            for named, optimizer in ((plain, one), (offloaded, two)):
                self.step(named, number)
                optimizer.step()
            assert away == {id(parameter) for parameter in offloaded.values()}
        assert seen == [(1, 0), (1, 1), *[(1, 1)] * 4]  # of two parameters; at first there are no moments
        for name in plain:
            assert torch.equal(plain[name], offloaded[name])
        kept = one.tensors()
        assert kept.keys() == two.tensors().keys()
        assert all(torch.equal(tensor, kept[name]) for name, tensor in two.tensors().items())

    def test_states_of_torchs_other_kinds_of_adamw_load_and_go_on(self) -> None:
        theirs, _ = self.make()
        adam = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.1, foreach=True)
        for number in range(3):
            self.step(theirs, number)
            adam.step()
        kept = {f"{n}|{key}": value.clone() for n, one in theirs.items() for key, value in adam.state[one].items()}
        named, optimizer = self.make()
        for name, one in named.items():
            one.data.copy_(theirs[name].data)
        optimizer.load(kept, 3)
        assert optimizer.tensors().keys() == kept.keys()
        assert all(torch.equal(one, kept[name]) for name, one in optimizer.tensors().items())
        for one in (theirs, named):
            self.step(one, 3)
        adam.step()
        optimizer.step()
        for name, one in named.items():
            torch.testing.assert_close(one, theirs[name])


@pytest.mark.slow
@pytest.mark.parametrize("want", [("log_probs",), ("log_probs", "entropy"), ("sum_pi_squared",)])
def test_heads_with_adapters_give_what_plain_ones_give(folder: Path, batch: DataProto, want: tuple[str, ...]) -> None:
    pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    plain = local(folder, device="cpu")
    adapted = local(folder, device="cpu", lora_rank=4, lora_targets=("lm_head", "q_proj"))
    assert type(head_of(adapted._model).linear) is not torch.nn.Linear
    one, two = (engine.compute_log_probs(batch, want, 0.7) for engine in (plain, adapted))
    for name in want:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=1e-5)
    found = adapted.gradient(batch, LikelihoodLoss(), EngineContract.counts(batch))
    assert any("lm_head" in name for name in found)


@pytest.mark.slow
def test_the_exact_kl_knows_the_soft_cap_and_the_factor() -> None:
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    for kind, more in (("Gemma2", {"final_logit_softcapping": 0.5}), ("Granite", {"logits_scaling": 0.25})):
        config = getattr(transformers, f"{kind}Config")(**small, **more, attn_implementation="eager")
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for one in model.parameters():
            torch.nn.init.normal_(one)
        engine = LocalEngine(model, None, LocalSettings(device="cpu"))
        rows = EngineContract()
        batch = rows.batch(local_like(engine))
        reference = engine.reference()
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn_like(one) * 0.3)
        found = engine.full_kl(batch, reference, 0.7)
        ids, mask = batch["input_ids"], batch["response_mask"].bool()
        for row in range(len(batch)):
            inside = batch["attention_mask"][row].bool()
            log_p, log_q = (
                torch.log_softmax(each(input_ids=ids[row : row + 1, inside]).logits[0].float() / 0.7, -1)
                for each in (model, reference._engine._model)
            )
            expected = (log_p.exp() * (log_p - log_q)).sum(-1)[-int(mask[row].sum()) - 1 : -1]
            torch.testing.assert_close(found[row][mask[row]], expected, atol=1e-5, rtol=1e-4)


def local_like(engine: Any) -> Any:
    """Something that samples: random ids of the model's vocabulary."""
    from workbench.engines import Sample

    class Random:
        def sample_many(self, requests: Any) -> list[Sample]:
            lengths = [3 + number % 4 for number in range(len(requests))]
            drawn = [tuple(torch.randint(3, 60, (length,)).tolist()) for length in lengths]
            return [Sample(ids, tuple([-1.0] * len(ids)), "length", 0) for ids in drawn]

    return Random()


def test_packed_and_padded_scores_of_a_critic_and_of_the_models_own_logits(folder: Path, batch: DataProto) -> None:
    from workbench.engines.local_engine.forward import OWN

    critic = local(folder, device="cpu").critic(lr=1e-2)
    critic.learn(batch, LikelihoodLoss(want=("values",)), EngineContract.counts(batch))
    model, head = critic._model, critic._head
    for want, given in ((("values",), None), (("log_probs", "entropy"), OWN), (("log_probs", "entropy"), None)):
        with torch.no_grad():
            packed, padded = (scoring.outputs(model, head, batch, want, 1.0, one, given) for one in (True, False))
        for name in want:
            assert packed[name].abs().sum() > 0
            torch.testing.assert_close(packed[name], padded[name], atol=1e-5, rtol=1e-5)
