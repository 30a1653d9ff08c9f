"""The trainer computes the function of the plain transformers model, whatever the family, in every layout."""

import random

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_core.engines.checkpoint_names import CheckpointNames
from rlhf_core.engines.head import linear_float32
from rlhf_core.engines.policy_model import exported_name, load_policy
from rlhf_core.engines.rows import TokenRows
from rlhf_core.errors import ModelError
from rlhf_core.testing.families import FAMILIES, VOCABULARY, make_family

TOLERANCE = 1e-4
#: Families with layers that no mask keeps apart.
LEAKING = {"falcon-h1": "hybrid", "qwen3-next": "linear_attention"}

LAYOUTS = {
    "alone": [[[row]] for row in range(9)],
    "padded rows": [[[0], [5], [2], [7]], [[1], [3], [4], [6], [8]]],
    "shared prompts": [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8]]],
}


def ragged(lists):
    values = torch.tensor([token for one in lists for token in one], dtype=torch.int32)
    lengths = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def token_lists():
    """Three groups of three rows; most of them much longer than the families' windows."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(count)] for count in (5, 21, 12)]
    responses = [[rng.randrange(3, VOCABULARY) for _ in range(count)] for count in (4, 0, 42, 1, 17, 23, 6, 30, 12)]
    return [prompts[row // 3] for row in range(9)], responses


PROMPTS, RESPONSES = token_lists()
ROWS = TokenRows(*ragged(PROMPTS), *ragged(RESPONSES))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """More threads than idle cores would wait for each other at every tiny operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def find(name):
        if name not in made:
            made[name] = make_family(name, tmp_path_factory.mktemp(name))
        return str(made[name])

    return find


def plain_logprobs(model, temperature=1.0):
    """Of all response tokens, one row after the other, without anything of ours."""
    parts = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0].float()
        table = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        parts.append(table.gather(1, torch.tensor(response, dtype=torch.int64)[:, None]).squeeze(1))
    return torch.cat(parts)


def trainer_logprobs(policy, layout, temperature=1.0):
    """The same in the rows' order."""
    found = {}
    for units in LAYOUTS[layout]:
        batch = ROWS.batch(units)
        parts = policy(batch, temperature)[0].split(batch.lengths_K.tolist())
        found |= dict(zip((row for unit in units for row in unit), parts, strict=True))
    return torch.cat([found[row] for row in range(9)])


def load_plain(folder, dtype="float32"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logprobs_are_those_of_the_plain_model(family, folder):
    policy = load_policy(folder(family), "float32", gradient_checkpointing=False)
    expected = plain_logprobs(load_plain(folder(family)).eval(), 0.7)
    for layout in LAYOUTS:
        if layout == "shared prompts" and family in LEAKING:
            with pytest.raises(ValueError, match=LEAKING[family]):
                trainer_logprobs(policy, layout)
        else:
            assert float((trainer_logprobs(policy, layout, 0.7) - expected).abs().max()) < TOLERANCE, layout


@pytest.mark.parametrize("family", ["gemma2-softcaps", "granite", "phi-bias", "mistral-window", "mixtral"])
def test_gradients_are_those_of_the_plain_model(family, folder):
    policy, plain = load_policy(folder(family), "float32", gradient_checkpointing=False), load_plain(folder(family))
    weights = torch.linspace(-1, 1, len(ROWS.response_values))
    (trainer_logprobs(policy, "shared prompts") * weights).sum().backward()
    (plain_logprobs(plain) * weights).sum().backward()
    expected = dict(plain.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values())
    for name, parameter in policy.model.named_parameters():
        assert float((parameter.grad - expected[name].grad).abs().max()) <= TOLERANCE * largest, name


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_translate_to_the_tensors_of_the_checkpoint(family, folder):
    stored = load_file(f"{folder(family)}/model.safetensors")
    policy = load_policy(folder(family), "float32", gradient_checkpointing=False)
    parameters = {exported_name(name): parameter.detach() for name, parameter in policy.named_parameters()}
    names = CheckpointNames(policy.model, {name: tuple(p.shape) for name, p in parameters.items()})
    assert {name: tensor.shape for name, tensor in names.tensors.items()} == {
        n: tuple(t.shape) for n, t in stored.items()
    }
    for name, parameter in parameters.items():
        for part, tensor in names.parts({name: parameter}).items():
            assert names.tensors[part].parameter == name
            assert torch.equal(tensor, stored[part])


def test_a_checkpoint_that_joins_parameters_is_refused(folder, monkeypatch):
    def joined(model, parameters):
        return {"qkv": torch.cat(list(parameters.values()))}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", joined)
    with pytest.raises(ModelError, match="several parameters"):
        CheckpointNames(load_plain(folder("llama")), {"q": (2, 3), "k": (2, 3)})


@torch.no_grad()
def test_the_families_show_the_faults_that_they_are_for(folder):
    """A plain linear head, SDPA, or a mask without the window would be seen by far."""
    for family in ("granite", "cohere", "falcon-h1", "gemma2-softcaps"):
        model = load_plain(folder(family)).eval()
        ids = torch.tensor([PROMPTS[0] + RESPONSES[2]])
        hidden = model.base_model(ids).last_hidden_state
        linear = nn.functional.linear(hidden, model.get_output_embeddings().weight)
        assert float((linear.log_softmax(-1) - model(ids).logits.log_softmax(-1)).abs().mean()) > 100 * TOLERANCE
    ids = torch.tensor([PROMPTS[0] + RESPONSES[2]])
    for family, other in (
        ("gemma2-softcaps", {"attn_logit_softcapping": None}),
        ("mistral-window", {"sliding_window": None}),
        ("phi3-window", {"sliding_window": None}),
        ("gemma3", {"sliding_window": 4096}),
    ):
        model = load_plain(folder(family)).eval()
        wrong = AutoModelForCausalLM.from_pretrained(folder(family), attn_implementation="eager", **other).eval()
        gap = (model(ids).logits.log_softmax(-1) - wrong(ids).logits.log_softmax(-1)).abs().mean()
        assert float(gap) > 100 * TOLERANCE, family


def test_the_output_layer_computes_in_float32_with_the_gradients_of_its_own_type():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden, weight, bias = (torch.randn(*shape) for shape in ((5, 64), (99, 64), (99,)))
    inputs = [t.bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    logits = linear_float32(*inputs)
    expected = nn.functional.linear(*exact)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert float((nn.functional.linear(*inputs).double() - expected).detach().abs().max()) > 0.01
    logits.log_softmax(-1)[:, 3].sum().backward()
    expected.log_softmax(-1)[:, 3].sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0.02, atol=0.02)
