"""Generate text with a language model, streamed in pieces.

    generate_text(model, tokenizer, "Once upon a time", stream=lambda piece: print(piece, end="", flush=True))

A piece is text that later tokens cannot change: a character of several tokens is streamed once it is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.checks import check_int, check_number
from muonssm.lab.core.library_output import hide_length_warning

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode an incomplete character to this


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
    """Continue `prompt` up to the tokenizer's EOS or `max_new_tokens`; return the continuation without the prompt.

    Args:
        model: a transformers model with `generate`.
        tokenizer: its transformers tokenizer.
        prompt: text; an empty one starts from the tokenizer's BOS, or else from EOS.
        max_new_tokens: the most tokens to generate, >= 1.
        temperature: divides the logits, > 0.
        top_p: in (0, 1]; sample from the most likely tokens with this total probability.
        top_k: sample from this many most likely tokens; 0 for all.
        greedy: take the most likely token; ignores `temperature`, `top_p` and `top_k`.
        seed: seed of the samples; torch's generators are restored afterwards. None: sample from their current state.
        stream: called with each piece; the pieces joined are the return value.
    """
    _check_arguments(prompt, max_new_tokens, temperature, top_p, top_k, seed)
    ids = _encode_prompt(model, tokenizer, prompt)
    streamer = _PieceStreamer(tokenizer, stream)
    sampling: dict[str, Any] = {"do_sample": not greedy}
    if not greedy:
        sampling |= {"temperature": float(temperature), "top_p": float(top_p), "top_k": top_k}
    eos = model.generation_config.eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    pad = eos[0] if isinstance(eos, list) else eos  # a single sequence is never padded; transformers warns if unset
    with evaluation_mode(model), hide_length_warning(), torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=pad,
            streamer=streamer,
            **sampling,
        )
    return streamer.text


def trained_length(model: Any) -> float:
    """The sequence length that the model was trained on; infinite where its configuration does not say."""
    length = getattr(model.config, "max_position_embeddings", None)
    return float("inf") if length is None else length


def check_prompt(model: Any, tokenizer: Any, prompt: str) -> None:
    """Raise if the prompt is longer than the training length, where `generate_text` only warns."""
    count, trained = len(tokenizer(prompt)["input_ids"]) if prompt else 0, trained_length(model)
    if count > trained:
        raise ValueError(
            f"PROMPT must have at most {trained} tokens, the training length, got {count}; use --beyond to allow more"
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients inside; restore the model's mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


class _PieceStreamer:
    """A streamer for transformers' `generate` that passes on text once it is final.

    transformers' own `TextStreamer` decodes the new tokens without the prompt, and each line without the line before.
    Tokenizers that mark spaces at the start of words then lose a space. This one decodes new tokens together with the
    previous piece.
    """

    def __init__(self, tokenizer: Any, stream: Callable[[str], None] | None) -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.ids: list[int] = []
        self.previous_start = 0  # where the previous piece begins
        self.pending_start: int | None = (
            None  # where the tokens begin that are not streamed yet; None before the prompt
        )
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far, without the prompt."""
        return "".join(self.pieces)

    def put(self, tokens: Tensor) -> None:
        """Take the prompt `[1, L]` first, then tokens `[1]` as they are generated."""
        self.ids += tokens.flatten().tolist()
        if self.pending_start is None:
            self.pending_start = len(self.ids)
        else:
            self._stream_pending(is_last=False)

    def end(self) -> None:
        """Stream the rest."""
        self._stream_pending(is_last=True)

    def _stream_pending(self, is_last: bool) -> None:
        previous = self._decode(self.ids[self.previous_start : self.pending_start])
        text = self._decode(self.ids[self.previous_start :])
        if len(text) <= len(previous) or (text.endswith(INCOMPLETE) and not is_last):
            return
        piece = text[len(previous) :]
        self.previous_start, self.pending_start = self.pending_start or 0, len(self.ids)
        self.pieces.append(piece)
        if self.stream is not None:
            self.stream(piece)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _encode_prompt(model: Any, tokenizer: Any, prompt: str) -> Tensor:
    """Token ids `[1, L]`, L >= 1, on the model's device; warn if L exceeds the training length."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    if ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
        ids = ids[:-1]  # some tokenizers append EOS to every text
    if not ids:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise ValueError(f"prompt must have tokens for a tokenizer without BOS and EOS, got {prompt!r}")
        ids = [start]
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= vocab_size:
        raise ValueError(f"tokenizer must give ids in 0 to {vocab_size - 1} for this model, got {max(ids)}")
    trained = trained_length(model)
    if len(ids) > trained:
        warnings.warn(f"the prompt has {len(ids)} tokens; the model was trained on at most {trained}", stacklevel=3)
    return torch.tensor([ids], device=model.device)


def _check_arguments(
    prompt: str, max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None
) -> None:
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be a string, got {prompt!r}")
    check_int("max_new_tokens", max_new_tokens, 1)
    check_int("top_k", top_k, 0)
    if seed is not None and check_int("seed", seed, 0) >= 2**63:
        raise ValueError(f"seed must be < 2**63, got {seed}")
    check_number("temperature", temperature, 0, open_low=True)
    check_number("top_p", top_p, 0, 1, open_low=True)
