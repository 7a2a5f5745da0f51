"""A reward model's own template: the text that it reads of a sample, as token ids, and where in them the response begins."""

from transformers import PreTrainedTokenizerBase

from async_rlhf.config import UserError, require
from async_rlhf.data import fill_template, template_columns
from async_rlhf.rewards.base import Sample

RESPONSE = "{response}"


def check_template(template: str) -> None:
    require(RESPONSE in template, f"template {template!r}: it has no {RESPONSE}")
    template_columns(template)


def columns_of(template: str | None, prompt_column: str | None) -> set[str]:
    """The columns of the data set that a template reads."""
    return (template_columns(template) - {"prompt", "response"}) | ({prompt_column} if prompt_column else set())


class Template:
    """Token ids of samples in a reward model's own form: a format string with `{prompt}`, `{response}` and columns, or, where there is
    none, the chat template of `tokenizer`, filled with `prompt_column` (text or a conversation) or the prompt, and the response.

    Raises:
        UserError: a tokenizer that does not say which characters a token stands for, or that has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str | None, prompt_column: str | None, policy_marks: set[str]):
        """`policy_marks`: the special tokens of the policy, which a prompt that goes into another chat template must not have."""
        require(tokenizer.is_fast, "a template needs a tokenizer that says where each token stands: one of the `tokenizers` library")
        require(text or tokenizer.chat_template, "chat_template: the reward model's tokenizer has none; write a `template`")
        self.tokenizer, self.text, self.prompt_column, self.policy_marks = tokenizer, text, prompt_column, policy_marks

    def __call__(self, sample: Sample) -> tuple[list[int], int]:
        """The ids, special tokens included, and the number of those before the response.

        A format string's text gets the begin-of-sequence token that it lacks, and that of the end if the response has ended. What a chat
        template writes is left as it is.
        """
        text, start = self.text_of(sample)
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        special = self.text is not None and not (bos and text.startswith(bos))
        encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        ids = encoded["input_ids"]
        before = next((i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > start), len(ids))
        if self.text and sample.finished and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids, before

    def text_of(self, sample: Sample) -> tuple[str, int]:
        """What is read, and where in it the response begins."""
        return self.format(sample) if self.text else self.chat(sample)

    def format(self, sample: Sample) -> tuple[str, int]:
        """The filled format string, and where in it the response begins."""
        values = {**sample.columns, "prompt": sample.prompt, "response": sample.response}
        before = fill_template(self.text.partition(RESPONSE)[0], values)
        return fill_template(self.text, values), len(before)

    def chat(self, sample: Sample) -> tuple[str, int]:
        """The filled chat template, and where in it the response begins."""
        prompt = sample.prompt
        if self.prompt_column:
            prompt = sample.columns.get(self.prompt_column)
            require(prompt is not None, f"prompt_column {self.prompt_column!r} of a row is null or not there: {str(sample.columns)[:200]}")
        elif marks := sorted(mark for mark in self.policy_marks if mark in prompt):
            raise UserError(f"chat_template: the prompt has {marks[0]!r} of the policy's own template in it: name its `prompt_column`")
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        answer = {"role": "assistant", "content": sample.response.strip()}
        whole = self.tokenizer.apply_chat_template([*turns, answer], tokenize=False)
        before = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return whole, same
