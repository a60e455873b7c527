"""Fake pipelines: a scripted model and a seeded one, both deterministic; and a tiny tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from meshnet.grammar import Want
from meshnet.timing import HopTiming
from meshnet.topology import NodeId
from meshnet_gateway.steps import StepOutput

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORCED = ("ok ", "<<E", "ND", ">>x")
"""Tokens that trouble report O2 forces, in this order."""

EOS = "<|im_end|>"
CONTEXT = 256
Logits = Callable[[Sequence[int], int], npt.NDArray[np.float32]]
"""All tokens fed so far and the number of the step, from 0, to float32 ``[vocab]``."""


def write_model(directory: Path, *, template: str | None = CHATML, context: int = CONTEXT) -> Path:
    """Write the text side of a tiny model: byte-level BPE of 256 bytes and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
    )
    tokenizer.train_from_iterator(["hello there, hello world", "the other one"], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in FORCED])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
        "model_max_length": 10**30,
    }
    if template is not None:
        settings["chat_template"] = template
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context,
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def answer(
    logits: npt.NDArray[np.float32], want: Want, timings: tuple[HopTiming, ...]
) -> StepOutput:
    """Answer as a last stage does: full logits, or the K largest with the log-sum-exp."""
    if want.kind == "logits":
        return StepOutput(logits, None, None, None, timings)
    assert want.kind == "top"
    order = np.argsort(-logits, kind="stable")[: want.top]
    wide = logits.astype(np.float64)
    log_sum_exp = float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    return StepOutput(None, order.astype(np.int32), logits[order], log_sum_exp, timings)


def scripted(token_ids: Sequence[int], vocab_size: int) -> Logits:
    """Make a model that says `token_ids` whatever the prompt, over and over."""

    def logits(history: Sequence[int], step: int) -> npt.NDArray[np.float32]:
        values = np.zeros(vocab_size, np.float32)
        values[token_ids[step % len(token_ids)]] = 20
        return values

    return logits


def seeded(vocab_size: int, spread: float = 3.0) -> Logits:
    """Make a model whose logits are noise that depends on all tokens so far."""

    def logits(history: Sequence[int], step: int) -> npt.NDArray[np.float32]:
        digest = hashlib.sha256(json.dumps(list(history)).encode()).digest()
        noise = np.random.default_rng(list(digest)).normal(0, spread, vocab_size)
        return noise.astype(np.float32)

    return logits


def hop_timings() -> tuple[HopTiming, ...]:
    """Two hops: 5 ms at the second, 12 ms at the first, which waits 7 ms for it."""
    return (
        HopTiming(NodeId("a"), 1.0, 3.0, 0.5, 7.0, 12.0, 8, 1152),
        HopTiming(NodeId("b"), 0.5, 4.0, 0.5, 0.0, 5.0, 1152, 40),
    )


@dataclass
class FakeFactory:
    """Opens sessions on a fake model and remembers all that happened to them.

    Attributes:
        logits: the model.
        fail_at: step, from 0, at which each session raises `error`.
        hold_at: step at which each session waits until `release` is set.
    """

    logits: Logits
    error: Exception | None = None
    fail_at: int = 0
    hold_at: int | None = None
    open_error: Exception | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: list[FakeSession] = field(default_factory=list)
    most_open: int = 0

    async def open(self, model: str, *, max_tokens: int) -> FakeSession:
        if self.open_error is not None:
            raise self.open_error
        session = FakeSession(self, model, max_tokens)
        self.sessions.append(session)
        self.all_closed.clear()
        self.most_open = max(self.most_open, self.num_open)
        return session

    @property
    def num_open(self) -> int:
        return sum(not session.closed for session in self.sessions)


@dataclass
class FakeSession:
    factory: FakeFactory
    model: str
    max_tokens: int
    history: list[int] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    closed: bool = False

    async def step(self, token_ids: Sequence[int], want: Want) -> StepOutput:
        assert not self.closed
        step = len(self.wants)
        self.wants.append(want)
        self.history.extend(token_ids)
        assert len(self.history) <= self.max_tokens
        await asyncio.sleep(0)
        if step == self.factory.hold_at:
            self.factory.holding.set()
            await self.factory.release.wait()
        if self.factory.error is not None and step >= self.factory.fail_at:
            raise self.factory.error
        return answer(self.factory.logits(self.history, step), want, hop_timings())

    async def close(self) -> None:
        self.closed = True
        if self.factory.num_open == 0:
            self.factory.all_closed.set()
