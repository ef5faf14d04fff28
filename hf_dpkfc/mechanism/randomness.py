"""Secret randomness: a key from the operating system, and one stream per step drawn from it.

A stream is PRF(key, step ‖ digest), where the digest covers everything that determines the query.
An identical replay of a step therefore draws the same batch and the same noise, which is the same
release and free; a step that differs in anything draws afresh.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from hf_dpkfc.errors import LedgerError

KEY_BYTES = 32

# Noise is drawn in pieces of this size, each from a stream of its own, so that threads can share
# the work and the result doesn't depend on how many there are.
CHUNK = 2**20

# A double carries its low bits: adding four independent draws hides them (Holohan & Braghin 2021).
SECURE_DRAWS = 4


@dataclass(frozen=True)
class SecretKey:
    """256 secret bits. Its ``repr`` doesn't show them."""

    secret: bytes

    def __repr__(self) -> str:
        return "SecretKey(…)"

    @classmethod
    def generate(cls) -> SecretKey:
        """A new key from the operating system's entropy."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: str | Path) -> SecretKey:
        """The key in a file that only its owner may read."""
        secret = Path(path).read_bytes()
        if len(secret) != KEY_BYTES:
            raise LedgerError(
                f"{path} holds {len(secret)} bytes, not a key of {KEY_BYTES}.",
                why="noise drawn from a damaged key could be predicted.",
                way_out="restore the key file, or start a new run with a new output_dir.",
            )
        return cls(secret)

    def store(self, path: str | Path) -> None:
        """Write the key once, readable by its owner alone, and make sure it is on disk."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.secret)
            file.flush()
            os.fsync(file.fileno())

    def mac(self, message: bytes, *, purpose: str) -> bytes:
        """HMAC-SHA256, separated by purpose."""
        return hmac.new(self.secret, purpose.encode() + b"\0" + message, hashlib.sha256).digest()


class Stream(Protocol):
    """Uniform and normal numbers of one purpose in one step."""

    def uniform(self, count: int) -> np.ndarray:
        """[count] float64 in [0, 1)."""
        ...

    def normal(self, count: int, dtype: type[np.floating]) -> np.ndarray:
        """[count] standard normals, in float32 or float64, or finer than asked for."""
        ...


@dataclass(frozen=True)
class StepRandomness:
    """All secret randomness of one logical step.

    Attributes:
        key: The run's key.
        step: Number of the step.
        digest: Digest of everything that determines the step's query.
        secure: ChaCha20 with summed draws, instead of Philox.
    """

    key: SecretKey
    step: int
    digest: bytes
    secure: bool = False

    def stream(self, purpose: str) -> Stream:
        """The stream of one purpose ("sampling", "noise"); purposes are independent."""
        message = self.step.to_bytes(8, "big") + self.digest
        seed = self.key.mac(message, purpose=purpose)
        return ChaChaStream(seed) if self.secure else PhiloxStream(seed)


@dataclass(frozen=True)
class PhiloxStream:
    """Counter-based and fast; all 256 bits of the seed enter, 128 as key and 128 as counter."""

    seed: bytes

    def uniform(self, count: int) -> np.ndarray:
        """[count] float64 in [0, 1)."""
        return self._generator(0).random(count)

    def normal(self, count: int, dtype: type[np.floating]) -> np.ndarray:
        """[count] standard normals, by ziggurat, in parallel chunks."""
        out = np.empty(count, dtype=dtype)
        starts = range(0, count, CHUNK)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda start: self._fill(out[start : start + CHUNK], start), starts))
        return out

    def _fill(self, out: np.ndarray, start: int) -> None:
        self._generator(1 + start // CHUNK).standard_normal(dtype=out.dtype, out=out)

    def _generator(self, block: int) -> np.random.Generator:
        key = int.from_bytes(self.seed[:16], "big")
        # 128 secret bits, 64 for the block; a block never draws the 2^64 numbers below it.
        counter = (int.from_bytes(self.seed[16:], "big") << 128) | (block << 64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True)
class ChaChaStream:
    """Cryptographic: ChaCha20's key stream, and normals as sums of several draws."""

    seed: bytes

    def uniform(self, count: int) -> np.ndarray:
        """[count] float64 in [0, 1) with 53 random bits."""
        return self._uniform(count, block=0)

    def normal(self, count: int, dtype: type[np.floating]) -> np.ndarray:
        """[count] float64 standard normals: Box-Muller, several draws added and rescaled.

        Always float64: rounded to float32 before they are added to a sum, they would lie on a grid
        again, and the sum's own low bits would show which grid.
        """
        out = np.empty(count, dtype=np.float64)
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            out[start : start + size] = self._normal_chunk(size, block=1 + start // CHUNK)
        return out

    def _normal_chunk(self, size: int, block: int) -> np.ndarray:
        u = 1.0 - self._uniform(SECURE_DRAWS * (size + size % 2), block)  # (0, 1]: log is finite
        radius, angle = u.reshape(2, SECURE_DRAWS // 2, -1)
        radius = np.sqrt(-2.0 * np.log(radius))
        angle = 2.0 * np.pi * angle
        # Shifted by one: both numbers of a pair in one sum would be a single draw, not two.
        draws = [radius * np.cos(angle), np.roll(radius * np.sin(angle), 1, axis=1)]
        return np.concatenate(draws).sum(0)[:size] / np.sqrt(SECURE_DRAWS)

    def _uniform(self, count: int, block: int) -> np.ndarray:
        # The first 8 bytes of a ChaCha20 nonce are its counter, the rest tells blocks apart.
        nonce = bytes(8) + block.to_bytes(8, "little")
        key_stream = Cipher(ChaCha20(self.seed, nonce), mode=None).encryptor()
        raw = np.frombuffer(key_stream.update(bytes(8 * count)), dtype=np.uint64)
        return (raw >> np.uint64(11)) * 2.0**-53
