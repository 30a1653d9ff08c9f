"""Variables of the chat template, and tools, with a small template on a real tokenizer."""

import pytest
import transformers

from rlhf_core.config.data import PromptsConfig
from rlhf_core.errors import ConfigError, ModelError, PromptError
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.prompts.tokenize import tokenize_prompts
from rlhf_core.testing.tiny_model import tiny_tokenizer_folder

THINKING = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '|' }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ 'no thinking' }}{% endif %}"
    "{% set style = style | default('plain') %}{{ style }}{{ bos_token }}"
    "{% if add_generation_prompt %}{% generation %}{{ strftime_now('') }}{% endgeneration %}{% endif %}"
)
TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ 'has ' + tool['name'] + '|' }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['name'] }}{{ call['arguments'] | tojson }}{% endfor %}|{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '|' }}{% endfor %}"

CALLED = Prompt(
    "c",
    "2 + 3?",
    messages=(
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
        {"role": "tool", "content": "5"},
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Function: template, or templates by name -> folder of a tokenizer with it."""
    original = tiny_tokenizer_folder(tmp_path_factory.mktemp("models"))

    def make(template):
        tokenizer = transformers.AutoTokenizer.from_pretrained(original)
        tokenizer.chat_template = template
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(folder)
        return folder

    return make


def texts(prompts, folder, **options):
    table = tokenize_prompts(prompts, folder, PromptsConfig(**options), context=4096, max_new_tokens=8).kept
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(ids) for ids in table["prompt_ids"].to_pylist()]


def test_variables_reach_the_template(model):
    folder = model(THINKING)
    (plain,) = texts([Prompt("a", "Hi")], folder)
    (quiet,) = texts([Prompt("a", "Hi")], folder, template={"enable_thinking": False, "style": "odd"})
    assert plain.startswith("user: Hi|plain")
    assert quiet.startswith("user: Hi|no thinkingodd")


def test_a_variable_that_the_template_does_not_use(model):
    with pytest.raises(ConfigError) as caught:
        texts([Prompt("a", "Hi")], model(THINKING), template={"enable_thinkin": False})
    assert "prompts.template.enable_thinkin" in str(caught.value)
    assert "variables that it uses: 'enable_thinking', 'style'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"prompts.template.thinking.*variables that it uses: none"):
        texts([Prompt("a", "Hi")], model(PLAIN), template={"thinking": True})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_that_the_prompts_set(model, name):
    with pytest.raises(ConfigError, match=f"prompts.template.{name}.*set by the prompts"):
        texts([Prompt("a", "Hi")], model(THINKING), template={name: []})


def test_tools_and_calls_reach_the_template(model):
    tool = ({"name": "add"},)
    prompts = [Prompt("a", "Hi", tools=tool), Prompt("b", "Hi"), CALLED]
    assert texts(prompts, model(TOOLS)) == [
        "has add|user: Hi|",
        "user: Hi|",
        'user: 2 + 3?|assistant: add{"a": 2}|tool: 5|',
    ]


def test_tools_that_the_template_would_leave_out(model):
    folder = model(PLAIN)
    with pytest.raises(PromptError, match=r"prompt a \(number 2\) has tools.*prompts.tools_column"):
        texts([Prompt("b", "Hi"), Prompt("a", "Hi", tools=({"name": "add"},))], folder)
    with pytest.raises(PromptError, match=r"prompt c \(number 1\) has tool calls"):
        texts([CALLED], folder)


def test_a_template_of_its_own_for_tools(model):
    folder = model({"default": PLAIN, "tool_use": TOOLS})
    assert texts([Prompt("a", "Hi")], folder) == ["user: Hi|"]
    assert texts([Prompt("a", "Hi", tools=({"name": "add"},))], folder) == ["has add|user: Hi|"]


def test_templates_that_break(model):
    with pytest.raises(PromptError, match=r"prompt a \(number 1\): the model's chat template refuses it"):
        texts([Prompt("a", "Hi")], model("{{ messages[0]['content'] + 1 }}"))
    with pytest.raises(ModelError, match="no valid Jinja"):
        texts([Prompt("a", "Hi")], model("{% if %}"))
