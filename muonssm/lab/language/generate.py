"""Text from a language model, handed on piece by piece while it is made.

    generate_text(model, tokenizer, "Once upon a time", stream=lambda piece: print(piece, end="", flush=True))

A piece is text that later tokens cannot change: a character made of several tokens comes out once it is whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.checks import is_int, is_number
from muonssm.lab.core.library_output import hide_length_warning

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode a part of a character to


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    greedy: bool = False,
    seed: int | None = None,
    stream: Callable[[str], None] | None = None,
) -> str:
    """Continues `prompt`, until the tokenizer's end token or `max_new_tokens`; returns the continuation alone.

    Args:
        model: a transformers model with `generate`.
        tokenizer: its transformers tokenizer.
        prompt: text; an empty one starts from the tokenizer's start token, or else its end token.
        max_new_tokens: at most so many, >= 1.
        temperature: > 0; what logits are divided by.
        top_p: in (0, 1]; the share of probability to draw from, the likeliest tokens first.
        top_k: how many tokens to draw from, the likeliest first; 0 for no such bound.
        greedy: takes the likeliest token; `temperature`, `top_p` and `top_k` then count for nothing.
        seed: of the draws; torch's generators are as before afterwards. None draws from them as they are.
        stream: is called with each piece; together they are what is returned.
    """
    _check(prompt, max_new_tokens, temperature, top_p, top_k, seed)
    ids = _encode(model, tokenizer, prompt)
    pieces = _Pieces(tokenizer, stream)
    sampling: dict[str, Any] = {"do_sample": not greedy}
    if not greedy:
        sampling |= {"temperature": float(temperature), "top_p": float(top_p), "top_k": top_k}
    end = model.generation_config.eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    pad = end[0] if isinstance(end, list) else end  # never used by a single sequence; unset, transformers warns
    with evaluating(model), hide_length_warning(), torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=pad,
            streamer=pieces,
            **sampling,
        )
    return pieces.text


def trained_length(model: Any) -> float:
    """Tokens of the sequences that the model was trained on, as far as its configuration says."""
    found = getattr(model.config, "max_position_embeddings", None)
    return float("inf") if found is None else found


def check_prompt(model: Any, tokenizer: Any, prompt: str) -> None:
    """Raises where the prompt is longer than what the model was trained on; `generate_text` would only warn."""
    count, trained = len(tokenizer(prompt)["input_ids"]) if prompt else 0, trained_length(model)
    if count > trained:
        raise ValueError(
            f"PROMPT has {count} tokens; it may have {trained}, as in training, or any number with --beyond"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout and gradients inside, in the mode it was in afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


class _Pieces:
    """A streamer of transformers' `generate`: collects tokens, and hands on the text that is sure.

    transformers' own `TextStreamer` decodes the new tokens apart from the prompt, and each line apart from the one
    before; tokenizers that mark spaces at the start of words then lose a space there. Here new tokens are decoded
    behind those of the piece before them.
    """

    def __init__(self, tokenizer: Any, stream: Callable[[str], None] | None) -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.ids: list[int] = []
        self.behind = 0  # where the piece before begins
        self.read: int | None = None  # where the tokens begin that are not handed on yet; None before the prompt
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def put(self, tokens: Tensor) -> None:
        """The prompt `[1, L]` first, then tokens `[1]` as they come."""
        self.ids += tokens.flatten().tolist()
        if self.read is None:
            self.read = len(self.ids)
        else:
            self._hand_on(sure=False)

    def end(self) -> None:
        """No more tokens will come."""
        self._hand_on(sure=True)

    def _hand_on(self, sure: bool) -> None:
        known = self._decode(self.ids[self.behind : self.read])
        text = self._decode(self.ids[self.behind :])
        if len(text) <= len(known) or (text.endswith(UNFINISHED) and not sure):
            return
        piece = text[len(known) :]
        self.behind, self.read = self.read or 0, len(self.ids)
        self.pieces.append(piece)
        if self.stream is not None:
            self.stream(piece)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _encode(model: Any, tokenizer: Any, prompt: str) -> Tensor:
    """Token numbers `[1, L]`, L >= 1, on the model's device; warns where L is more than the model was trained on."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    if ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
        ids = ids[:-1]  # some tokenizers end every text; this one is to go on
    if not ids:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise ValueError(
                f"prompt is {prompt!r} with a tokenizer without start and end tokens; it may be a text with tokens"
            )
        ids = [start]
    known = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= known:
        raise ValueError(f"tokenizer gives the token {max(ids)}; with this model it may give 0 to {known - 1}")
    trained = trained_length(model)
    if len(ids) > trained:
        warnings.warn(f"the prompt has {len(ids)} tokens; the model was trained on at most {trained}", stacklevel=3)
    return torch.tensor([ids], device=model.device)


def _check(prompt: str, max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None) -> None:
    if not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r}; it may be a text")
    whole = {"max_new_tokens": (max_new_tokens, 1), "top_k": (top_k, 0)}
    if seed is not None:
        whole["seed"] = (seed, 0)
    for name, (value, least) in whole.items():
        if not is_int(value, least):
            raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")
    if seed is not None and seed >= 2**63:
        raise ValueError(f"seed is {seed}; it may be less than 2**63")
    if not is_number(temperature) or not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature!r}; it may be a number > 0 (greedy takes the likeliest token)")
    if not is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}; it may be in (0, 1]")
