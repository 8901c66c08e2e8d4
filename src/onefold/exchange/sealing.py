"""A store whose values only processes with the secret of the run can write.

Whoever reaches the store's port may set any key, ahead of its owner or after it: the address at
which a device listens, say. So each value carries a digest of its key and of itself, keyed with the
secret (HMAC-SHA256), and one without it ends the run. Counters and the mere presence of keys carry
none: a stranger can hold a run up with those, or end it, and nothing else.
"""

from __future__ import annotations

import hmac
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported

from onefold.errors import DisagreementError

__all__ = ["SealedStore", "refuse_sealed"]

_MARK = b"onefold-sealed:"
_DIGITS = 64


class SealedStore(Store):
    """Seals what is set in a store, and checks what is read from it.

    gloo reads and writes through it as well, so it must live as long as the group. It has what gloo
    and onefold use of a store, and no more.

    Args:
        store: what keeps the values.
        secret: of the run.
        run_id: tells apart the runs that have the same secret.
    """

    def __init__(self, store: Store, secret: bytes, run_id: str) -> None:
        super().__init__()
        self._store, self._secret, self._run_id = store, secret, run_id.encode()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if expected:
            raise NotImplementedError(f"{key}: only what was not there before can be set")
        return self._opened(key, self._store.compare_set(key, "", self._sealed(key, desired)))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def _sealed(self, key: str, value: str | bytes) -> str:
        text = value if isinstance(value, bytes) else value.encode()
        # As text, since a store takes values from Python as such.
        return (_MARK + self._seal(key, text) + text.hex().encode()).decode()

    def _opened(self, key: str, text: bytes) -> bytes:
        """The value that was sealed; raises where it was not sealed with this secret."""
        seal, value = text[len(_MARK) :][:_DIGITS], text[len(_MARK) + _DIGITS :]
        try:
            found = bytes.fromhex(value.decode())
        except ValueError:
            found = b""
        if not (text.startswith(_MARK) and hmac.compare_digest(seal, self._seal(key, found))):
            raise DisagreementError(
                f"the store of the run has a value under {key} that was written without the secret "
                f"of this run: start every process with the same ONEFOLD_SECRET, or none with any. "
                f"If they have it, a stranger writes to the store: look who can reach its host"
            )
        return found

    def _seal(self, key: str, value: bytes) -> bytes:
        parts = [self._run_id, key.encode(), value]
        # Each with its length, so that no two lists of parts give one text.
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, b"onefold store" + text, "sha256").hex().encode()


def refuse_sealed(key: str, text: bytes) -> bytes:
    """Refuse a value that a process with a secret has written, where this one has none.

    Raises:
        DisagreementError: it is one.
    """
    if text.startswith(_MARK):
        raise DisagreementError(
            f"a process of the run has ONEFOLD_SECRET and this one has not ({key}): start every "
            f"process with the same one, or none with any"
        )
    return text
