"""The policy's logprobs and gradients against a plain forward pass of the same Hugging Face model."""

import copy
import random

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_core.engines.policy_model import PolicyModel, exported_name, load_policy
from rlhf_core.engines.rows import TokenRows
from rlhf_core.errors import ModelError
from rlhf_core.testing.tiny_model import byte_tokenizer_folder, make_tiny_model

TOLERANCE = 1e-5
VOCABULARY = 211  # tokens that occur in the rows; every model knows at least these


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), byte_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


def qwen2():
    """Grouped-query attention, biases, an output layer of its own."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


@pytest.fixture(params=["tiny", "qwen2"])
def policy(request, tiny_folder):
    if request.param == "qwen2":
        return PolicyModel(qwen2()).train()
    return load_policy(str(tiny_folder), "float32", gradient_checkpointing=False)


def ragged(lists):
    values = torch.tensor([token for one in lists for token in one], dtype=torch.int32)
    lengths = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


@pytest.fixture(scope="module")
def lists():
    """Three groups of three rows, lengths from 0 to 12."""
    rng = random.Random(0)

    def tokens(count):
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    prompts = [tokens(count) for count in (5, 11, 2)]
    lengths = (4, 0, 12, 1, 7, 3, 6, 9, 2)
    return [prompts[i // 3] for i in range(9)], [tokens(count) for count in lengths]


@pytest.fixture(scope="module")
def rows(lists):
    return TokenRows(*ragged(lists[0]), *ragged(lists[1]))


def run(policy, rows, microbatches, temperature=0.7):
    """Logprobs and entropies by row, and the gradients of a fixed weighted sum of both over all micro-batches."""
    weights = torch.linspace(-1, 1, len(rows.response_values))
    policy.zero_grad()
    result = {}
    for units in microbatches:
        batch = rows.batch(units)
        logprobs, entropies = policy(batch, temperature)
        assert logprobs.dtype == entropies.dtype == torch.float32
        order = [row for unit in units for row in unit]
        sizes = batch.lengths_K.tolist()
        parts = [weights[rows.response_offsets[row] : rows.response_offsets[row + 1]] for row in order]
        chosen = torch.cat([*parts, weights[:0]])
        ((logprobs * chosen).sum() + (0.1 * entropies * chosen).sum()).backward()
        splits = zip(order, logprobs.detach().split(sizes), entropies.detach().split(sizes), strict=bool(units))
        result |= {row: (logprob, entropy) for row, logprob, entropy in splits}
    return result, {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def assert_close(one, other):
    (rows_a, gradients_a), (rows_b, gradients_b) = one, other
    assert rows_a.keys() == rows_b.keys()
    for row, parts in rows_a.items():
        for a, b in zip(parts, rows_b[row], strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients_a.keys() == gradients_b.keys()
    # Relative to the largest gradient: some are sums that cancel (the bias of a key has gradient 0).
    largest = max(float(gradient.abs().max()) for gradient in gradients_b.values())
    assert largest > 0
    differences = {name: float((gradients_b[name] - gradient).abs().max()) for name, gradient in gradients_a.items()}
    assert max(differences.values()) <= TOLERANCE * largest, differences


ALONE = [[[row]] for row in range(9)]


@pytest.mark.parametrize(
    "microbatches",
    [
        [[[0], [1], [2], [3], [4], [5], [6], [7], [8]]],
        [[[8], [2]], [[0], [4], [7]], [[1]], [[3], [5], [6]]],
        [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]],
        [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]],
        [[[8, 6], [5], [2, 1, 0]], [[4, 3], [7]]],
        [[[0, 1, 2], [3, 4, 5]], [], [[6, 7, 8]], []],
    ],
    ids=["one batch", "uneven", "shared", "shared together", "shared in part", "with empty ones"],
)
def test_logprobs_and_gradients_do_not_depend_on_how_rows_are_cut(policy, rows, microbatches):
    assert_close(run(policy, rows, microbatches), run(policy, rows, ALONE))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(policy, lists, rows, temperature):
    shared, _ = run(policy, rows, [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]], temperature)
    for row, (prompt, response) in enumerate(zip(*lists, strict=True)):
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + response])).logits[0]
        table = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = table.gather(1, torch.tensor(response, dtype=torch.int64)[:, None]).squeeze(1)
        logprobs, entropies = shared[row]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(entropies, -(table.exp() * table).sum(-1), rtol=TOLERANCE, atol=TOLERANCE)


def test_gradients_are_those_of_a_plain_backward_pass(policy, lists, rows):
    weights, temperature = torch.linspace(-1, 1, len(rows.response_values)), 0.7
    _, gradients = run(policy, rows, [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]], temperature)
    plain = copy.deepcopy(policy.model)
    plain.zero_grad()
    start = 0
    for prompt, response in zip(*lists, strict=True):
        chosen, start = weights[start : start + len(response)], start + len(response)
        table = (plain(torch.tensor([prompt + response])).logits[0] / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs = table.gather(1, torch.tensor(response, dtype=torch.int64)[:, None]).squeeze(1)
        ((logprobs - 0.1 * (table.exp() * table).sum(-1)) * chosen).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_close(({}, {exported_name(name): gradient for name, gradient in gradients.items()}), ({}, expected))


def test_an_empty_micro_batch_reaches_every_parameter_with_gradient_zero(policy, rows):
    _, gradients = run(policy, rows, [[]])
    assert gradients.keys() == dict(policy.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_gradient_checkpointing_changes_nothing(tiny_folder, rows):
    plain, checkpointed = (load_policy(str(tiny_folder), "float32", flag) for flag in (False, True))
    assert any(getattr(module, "gradient_checkpointing", False) for module in checkpointed.modules())
    microbatches = [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8]]]
    assert_close(run(checkpointed, rows, microbatches), run(plain, rows, microbatches))


def test_a_loaded_policy_has_no_dropout(tmp_path, rows):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "float32", gradient_checkpointing=False)
    assert policy.training
    with torch.no_grad():
        first, second = (policy(rows.batch([[0], [2], [4]]), 1.0)[0] for _ in range(2))
        expected = policy.eval()(rows.batch([[0], [2], [4]]), 1.0)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_exported_names_are_those_of_the_checkpoint(tmp_path, tiny_folder, tied):
    from safetensors.torch import load_file

    folder = tiny_folder
    if not tied:
        model = qwen2()
        folder = tmp_path
        model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    policy = load_policy(str(folder), "float32", gradient_checkpointing=False)
    exported = {exported_name(name): parameter for name, parameter in policy.named_parameters()}
    assert exported.keys() == stored.keys()
    assert ("lm_head.weight" in exported) is not tied
    assert all(torch.equal(parameter, stored[name]) for name, parameter in exported.items())
    assert policy.head.weight is policy.model.get_output_embeddings().weight


def test_an_output_layer_of_an_unknown_kind_is_refused():
    model = qwen2()
    model.set_output_embeddings(nn.Bilinear(32, 32, VOCABULARY))
    with pytest.raises(ModelError, match="output layer is Bilinear"):
        PolicyModel(model)


def test_a_loaded_policy_has_the_wanted_type(tiny_folder):
    policy = load_policy(str(tiny_folder), "bfloat16", gradient_checkpointing=False)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
