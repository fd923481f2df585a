"""Text that comes token by token: what may be sent now, and where a stop string ends it.

What does not live here: stop tokens, which the scheduler knows, and whole texts (`tokenizer`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from reference_server.text.tokenizer import Tokenizer


class TextStream:
    """The text of one answer as its tokens arrive.

    stop: strings that end the text; what stands before the match is kept. The match that is complete first counts, and of
    those that are complete at the same character the longest, so the result does not depend on where tokens begin and end.

    What `push` and `finish` return, put together, is the text of all tokens up to that match. Nothing is returned that
    could still change: no half of a character, and no beginning of a stop string. The text continues a prompt, so a
    leading space stays. Cost per token: its own length plus at most the longest stop string.
    """

    __slots__ = ("_decoder", "_ended", "_held", "_stop", "_tokenizer", "stopped")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop must be a sequence of strings that are not empty, not {stop!r}")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._ended = False
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Take in tokens; the text that is safe to send. Empty once stopped. Raises `ValueError` after finish()."""
        if self._ended:
            raise ValueError("push() after finish()")
        if self.stopped:
            return ""
        return self._safe(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids))), final=False)

    def finish(self) -> str:
        """The rest: what was held back, unless a stop string ended the text."""
        if self._ended or self.stopped:
            self._ended = True
            return ""
        self._ended = True
        return self._safe(self._decoder.decode(b"", final=True), final=True)

    def _safe(self, new: str, *, final: bool) -> str:
        text = self._held + new
        if not self._stop or not text:
            return text
        matches = [(at + len(one), at) for one in self._stop if (at := text.find(one)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        cut = len(text) if final else len(text) - self._hopeful(text)
        self._held = text[cut:]
        return text[:cut]

    def _hopeful(self, text: str) -> int:
        """Characters at the end of a text that begin a stop string: the most of any."""
        longest = max(map(len, self._stop)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(one.startswith(text[-size:]) for one in self._stop):
                return size
        return 0
