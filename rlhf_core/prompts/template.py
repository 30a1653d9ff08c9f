"""The chat template of a model, with the run's variables: from conversations to text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, ModelError, PromptError
from rlhf_core.prompts.prompt import Prompt

if TYPE_CHECKING:
    from jinja2 import Environment

#: Variables that are set from the prompts, or by the way they are rendered.
_OWN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


def render_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], system: str | None, variables: Mapping[str, Any]
) -> Iterator[str]:
    """The text of each prompt with the generation prompt behind it, in order.

    ConfigError for a variable that the template does not use. PromptError for a prompt that the template refuses, or whose
    tools it would leave out. ModelError for a template that is no Jinja.
    """
    sources = _sources(tokenizer, any(p.tools for p in prompts))
    names = set().union(*(_undeclared(source) for source in sources))
    _check_variables(names, variables, set(tokenizer.special_tokens_map))
    _check_tools(prompts, "tools" in names, any("tool_calls" in source for source in sources))

    for row, prompt in enumerate(prompts, start=1):
        conversation = _messages(prompt, system)
        tools = list(prompt.tools) or None
        try:
            yield tokenizer.apply_chat_template(
                conversation, tools, tokenize=False, add_generation_prompt=True, **variables
            )
        except (
            Exception
        ) as error:  # boundary: templates refuse roles or their order by raising, and may break on others
            roles = ", ".join(m["role"] for m in conversation)
            raise PromptError(
                f"prompt {prompt.prompt_id} (number {row}): the model's chat template refuses it: {error} (roles: {roles}). "
                "Change the prompt, prompts.system, or the model"
            ) from error


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, Any]]:
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _sources(tokenizer: Any, with_tools: bool) -> list[str]:
    """The templates in use. Some models have one of its own for prompts with tools."""
    given: list[Any] = [None, [{}]] if with_tools else [None]
    try:
        return [tokenizer.get_chat_template(None, tools) for tools in given]
    except ValueError as error:
        raise ModelError(f"model.source: the chat template cannot be chosen: {error}") from None


def _undeclared(source: str) -> set[str]:
    """Variables that the template takes from outside."""
    from jinja2 import TemplateError, meta

    environment = _environment()
    try:
        return meta.find_undeclared_variables(environment.parse(source))
    except TemplateError as error:
        raise ModelError(f"model.source: the chat template is no valid Jinja: {error}") from None


def _environment() -> Environment:
    """What transformers parses chat templates with, as far as the syntax goes."""
    from jinja2 import Environment
    from jinja2.ext import Extension

    class Generation(Extension):
        """The block that marks an assistant's words."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"], autoescape=False)
    environment.globals |= {"raise_exception": None, "strftime_now": None}
    return environment


def _check_variables(names: set[str], variables: Mapping[str, Any], special: set[str]) -> None:
    for name in variables:
        if name in _OWN:
            raise ConfigError(f"prompts.template.{name}: this variable is set by the prompts themselves")
        if name not in names:
            known = ", ".join(map(repr, sorted(names - _OWN - special))) or "none"
            raise ConfigError(
                f"prompts.template.{name}: the model's chat template uses no such variable; variables that it uses: {known}"
            )


def _check_tools(prompts: Sequence[Prompt], tools: bool, calls: bool) -> None:
    for row, prompt in enumerate(prompts, start=1):
        if prompt.tools and not tools:
            raise PromptError(
                f"prompt {prompt.prompt_id} (number {row}) has tools, but the model's chat template knows none: use another "
                'model, or leave the tools out with prompts.tools_column = ""'
            )
        if not calls and any("tool_calls" in message for message in prompt.messages):
            raise PromptError(
                f"prompt {prompt.prompt_id} (number {row}) has tool calls, but the model's chat template would leave them "
                "out: use another model, or drop the row"
            )
