"""One private run: key, ledger, preconditioner and the step that ties them together.

The order inside a step is the guarantee: draw the batch, clip and sum, charge the ledger on disk,
and only then draw noise.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.curvature.probes import Probe
from hf_dpkfc.errors import BudgetError, LedgerError
from hf_dpkfc.global_state import seeded_global_state
from hf_dpkfc.layers.capture import PerExampleLoss
from hf_dpkfc.layers.routes import RouteTable
from hf_dpkfc.mechanism.clipping import ClippedSum, Clipper, UnsafeStatistics
from hf_dpkfc.mechanism.noise import privatize
from hf_dpkfc.mechanism.randomness import SecretKey, StepRandomness
from hf_dpkfc.mechanism.sampling import PoissonSampler
from hf_dpkfc.optimizers.disk import KalmanFilter
from hf_dpkfc.privacy.ledger import PrivacyLedger
from hf_dpkfc.privacy.plan import PrivacyPlan

logger = logging.getLogger(__name__)

CODE_VERSION = f"hf-dpkfc {version('hf-dpkfc')}, torch {torch.__version__}, {platform.machine()}"


class Peers(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int:
        """This process."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def gather(self, value: bytes) -> list[bytes]:
        """Every process's value, in order of rank, on every process."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every process."""
        ...

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, on every process."""
        ...


@dataclass(frozen=True)
class Alone:
    """A single process."""

    rank: int = 0
    world_size: int = 1

    def gather(self, value: bytes) -> list[bytes]:
        """Only its own."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value itself."""
        return value

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values themselves."""
        return dict(values)


class Verdict(StrEnum):
    """What the ledger says of a release."""

    CHARGED = "charged"
    REPLAYED = "replayed"
    DIVERGED = "diverged"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True)
class Query:
    """What determines a release, besides the parameters and the data.

    Attributes:
        model: Unwrapped.
        table: Its routes.
        per_example_loss: (model, inputs) -> [batch].
        loss_name: What tells the loss from another one, the same in every launch.
        dataset: The private records.
        collate: From records to model inputs on the model's device.
        max_micro_batch: Most examples that a process handles at once.
        length_of: From an index to its record's tokens; None where lengths don't matter.
    """

    model: nn.Module
    table: RouteTable
    per_example_loss: PerExampleLoss
    loss_name: str
    dataset: Sequence[Any]
    collate: Callable[[list[Any]], Mapping[str, Any]]
    max_micro_batch: int
    length_of: Callable[[int], int] | None = None


@dataclass(frozen=True)
class Geometry:
    """Where the preconditioner comes from and when it is renewed.

    Attributes:
        options: From probes to maps.
        probe: None where nothing is probed (``options.kind`` is "none").
        refresh_steps: Steps between two fits, once as many have been taken.
        seed: Public randomness.
    """

    options: CurvatureOptions
    probe: Probe | None
    refresh_steps: int
    seed: int

    def is_due(self, step: int, current: Preconditioner | None) -> bool:
        """Every ``refresh_steps``; at powers of two before that, or while a layer has no signal.

        A new head turns within a few steps, and with it what reaches every layer below: factors
        of step 0 would amplify where they had seen nothing, and one layer would take the clip norm
        from the others. A head alone has nothing below it.
        """
        if current is None or step % self.refresh_steps == 0:
            return True
        is_early = step < self.refresh_steps and len(current.maps) > 1
        return (is_early or current.awaits_signal) and step & (step - 1) == 0

    def seed_at(self, step: int) -> int:
        """Public randomness of the fit at a step."""
        return self.seed * 1_000_003 + step

    def fit(self, step: int, query: Query) -> Preconditioner:
        """The preconditioner at the present weights."""
        if self.probe is None:
            return Preconditioner.identity()
        return fit_preconditioner(
            query.model,
            self.probe,
            self.options,
            seed=self.seed_at(step),
            per_example_loss=query.per_example_loss,
            table=query.table,
        )


@dataclass
class PrivateRun:
    """Releases of one training run under one plan.

    Attributes:
        plan: Frozen before anything else.
        key: The run's secret, the same on all processes.
        ledger: Rank 0's; None elsewhere.
        query: What is asked.
        geometry: In which space it is clipped.
        peers: The processes that train together.
        secure: Cryptographic randomness.
        nonce: Mixed into every stream. Empty while steps can be replayed bit for bit; set per
            launch where the backward pass isn't deterministic, and once a replay has diverged.
        filter: DiSK's, between the noise and the optimizer; None without it.
    """

    plan: PrivacyPlan
    key: SecretKey
    ledger: PrivacyLedger | None
    query: Query
    geometry: Geometry
    peers: Peers = field(default_factory=Alone)
    secure: bool = False
    nonce: bytes = b""
    filter: KalmanFilter | None = None
    preconditioner: Preconditioner | None = None
    unsafe: UnsafeStatistics = field(default_factory=UnsafeStatistics)

    def __post_init__(self) -> None:
        self._frozen_digest = _digest_of(_fixed_tensors(self.query.model, self.query.table))
        self._clipper: Clipper | None = None

    @property
    def num_releases(self) -> int:
        """Releases charged so far; known to every process."""
        mine = self.ledger.num_releases if self.ledger else 0
        return int(self.peers.broadcast(mine))

    def release(self, step: int) -> dict[str, Tensor] | None:
        """The noisy mean gradient of one logical step, filtered if there is a filter.

        None if the budget doesn't allow it.

        Args:
            step: Number of the step, the same on all processes.
        """
        self._refresh(step)
        clipped, digest, verdict = self._attempt(step)
        if verdict is Verdict.DIVERGED:
            logger.warning(
                "Step %d was released before with other weights, data, options or code: it is "
                "drawn afresh and charged again, so the run stops that much earlier.",
                step,
            )
            self.nonce = self.peers.broadcast(os.urandom(16))
            clipped, digest, verdict = self._attempt(step)
        if verdict is Verdict.EXHAUSTED:
            return None
        self.unsafe = clipped.unsafe
        randomness = StepRandomness(self.key, step, digest, self.secure)
        noisy_mean = privatize(
            clipped, self.plan.noise_multiplier, self.plan.expected_batch_size, randomness
        )
        return noisy_mean if self.filter is None else self.filter.update(noisy_mean, self._weights)

    @property
    def _weights(self) -> dict[str, Tensor]:
        """The parameters that train."""
        trainable = {n for block in self.query.table for n in block.parameters}
        return {n: p for n, p in self.query.model.named_parameters() if n in trainable}

    def may_release(self, step: int) -> bool:
        """Whether a step has budget left, or may be the replay of one that is paid for."""
        mine = self.ledger is None or (
            self.ledger.num_releases < self.plan.steps or self.ledger.has_step(step)
        )
        return bool(self.peers.broadcast(mine))

    def require_charged(self, step: int) -> None:
        """Raise if a step was taken of which the ledger knows nothing.

        Raises:
            LedgerError: If budget is left and the step isn't charged: no release was asked for.
        """
        if self.ledger is None or self.ledger.has_step(step):
            return
        if self.ledger.num_releases < self.plan.steps:
            raise LedgerError(
                f"Step {step} was taken without a release.",
                why="its gradient was neither clipped nor noised nor charged, so the weights "
                "aren't private any more.",
                way_out="don't replace training_step; use callbacks, or per_example_loss=.",
            )

    def close(self) -> None:
        """Let go of the ledger."""
        if self.ledger is not None:
            self.ledger.close()

    def _refresh(self, step: int) -> None:
        if self.geometry.is_due(step, self.preconditioner):
            renewed = self.geometry.fit(step, self.query)
            if renewed.notes and self.preconditioner is None:
                logger.warning(
                    "preconditioner: %d blocks fall back to something simpler, the first: %s (all "
                    "of them: trainer.preconditioner.notes)",
                    len(renewed.notes),
                    renewed.notes[0],
                )
            self.preconditioner = renewed
            self._clipper = None
        if self._clipper is None:
            assert self.preconditioner is not None
            query = self.query
            self._clipper = Clipper(
                query.model,
                query.table,
                self.preconditioner,
                query.per_example_loss,
                self.plan.clip_norm,
            )
            self._geometry_digest = self.preconditioner.fingerprint.encode()

    def _attempt(self, step: int) -> tuple[ClippedSum, bytes, Verdict]:
        """Draw, clip, sum, and ask the ledger; no noise yet."""
        assert self._clipper is not None
        before = self._digest()
        content = hashlib.sha256()
        randomness = StepRandomness(self.key, step, before, self.secure)
        lookahead = None if self.filter is None else self.filter.lookahead(self._weights)
        with seeded_global_state(self._secret_seed(randomness)):
            mine = self._clipper.sum_of(self._micro_batches(randomness, content), lookahead)
        # Whatever else may change a query (precision, a constant in a loss) changes its sum.
        _update(content, sorted(mine.values.items()))
        total = ClippedSum(self.peers.sum(mine.values), mine.sensitivity, mine.unsafe)
        digest = self._with_content(before, content.digest())
        return total, digest, self.peers.broadcast(self._ask_ledger(step, digest))

    def _secret_seed(self, randomness: StepRandomness) -> np.ndarray:
        """What dropout and random collators draw from.

        With the public seed, one record more would shift everybody's dropout masks in a way that an
        adversary could follow, and the state in a checkpoint would tell how much was drawn.
        """
        words = randomness.stream(f"dropout {self.peers.rank}").uniform(8) * 2**32
        return words.astype(np.uint32)

    def _micro_batches(
        self, randomness: StepRandomness, content: hashlib._Hash
    ) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Collated one at a time; everything that is read goes into the content's hash."""
        sampler = PoissonSampler(
            len(self.query.dataset),
            self.plan.sampling_rate,
            self.query.max_micro_batch,
            self.peers.rank,
            self.peers.world_size,
        )
        for indices in sampler.micro_batches(randomness, self.query.length_of):
            inputs = self.query.collate([self.query.dataset[i] for i in indices])
            _update(content, ((k, v) for k, v in inputs.items() if isinstance(v, Tensor)))
            yield inputs, len(indices)

    def _digest(self) -> bytes:
        """Everything that determines the step's query, but the records drawn."""
        parts = [
            self.plan.digest.encode(),
            CODE_VERSION.encode(),
            self.nonce,
            bytes([self.secure]),
            self._geometry_digest,
            self._frozen_digest,
            self.query.loss_name.encode(),
            _digest_of(self._weights.items()),
        ]
        if self.filter is not None:
            parts.append(_digest_of(self.filter.determinants()))
        # Rank 0's, so that all ranks draw one batch and one noise whatever their rounding.
        return self.peers.broadcast(hashlib.sha256(b"\0".join(parts)).digest())

    def _with_content(self, before: bytes, content: bytes) -> bytes:
        # Keyed: without the key, the digest of private records tells nothing about them.
        contents = b"".join(self.peers.gather(content))
        return self.peers.broadcast(self.key.mac(before + contents, purpose="content"))

    def _ask_ledger(self, step: int, digest: bytes) -> Verdict:
        if self.ledger is None:
            return Verdict.CHARGED  # rank 0's answer is the one that counts
        if self.ledger.has(step, digest.hex()):
            return Verdict.REPLAYED
        if self.ledger.has_step(step) and not self.nonce:
            return Verdict.DIVERGED
        try:
            self.ledger.charge(step, digest.hex())
        except BudgetError:
            return Verdict.EXHAUSTED
        return Verdict.CHARGED


def _fixed_tensors(model: nn.Module, table: RouteTable) -> Iterator[tuple[str, Tensor]]:
    trainable = {n for block in table for n in block.parameters}
    yield from ((n, p) for n, p in model.named_parameters() if n not in trainable)
    yield from model.named_buffers()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of a model's weights, trained or frozen, whatever trains now."""
    return _digest_of(sorted(model.named_parameters())).hex()


def _digest_of(tensors: Any) -> bytes:
    digest = hashlib.sha256()
    _update(digest, tensors)
    return digest.digest()


def _update(digest: hashlib._Hash, tensors: Any) -> None:
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().reshape(-1)
        if flat.stride(0) != 1:  # one element of a column counts as contiguous, but isn't viewable
            flat = flat.clone(memory_format=torch.contiguous_format)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
