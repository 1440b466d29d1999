"""The training loop: steps, evaluation, checkpoints, and an orderly end after signals and errors."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections import deque

import torch
from accelerate.utils import gather_object
from torch import Tensor

from longspan.generation.generate import generate
from longspan.generation.sampling import Sampling
from longspan.generation.tokenization import TextCodec
from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.train.data.batches import Batch, derive_seed
from longspan.train.evaluation import evaluate_held_out
from longspan.train.fsdp import gather_model, gather_optimizer, is_sharded, load_optimizer
from longspan.train.loggers import Logger, Record, mean, memory_used, truncate_records
from longspan.train.objectives import mask_tokens
from longspan.train.run_checkpoint import (
    RUN,
    check_writable,
    checkpoint_bytes,
    pack_state,
    random_states,
    save_checkpoint,
    set_random_states,
    unpack_state,
)
from longspan.train.setup import TrainingSetup, learning_rate
from longspan.train.signals import SignalHandler, StoppedError, TrainingTimer, out_of_memory_message
from longspan.utils import write_atomically

WARMUP_STEPS = 3  # steps in which torch.compile compiles, runs eagerly once and captures CUDA graphs
# Divergence compares the mean of the latest losses with that of the losses before them.
_BASELINE_LOSSES, _LATEST_LOSSES = 50, 10
BAD_BATCH = "bad-batch.pt"


class Trainer:
    """Trains a model to the end of a run.

    Args:
        setup: Model, data and optimizer.
        logger: Receives metrics and messages.

    Attributes:
        step: Steps done.
        tokens: Tokens read for them.
        done: Fraction of the run that is done, from 0 to 1.
    """

    def __init__(self, setup: TrainingSetup, logger: Logger) -> None:
        self.setup, self.logger = setup, logger
        self.device = setup.accelerator.device
        self.sharded = is_sharded(setup.accelerator)
        self.step, self.tokens = 0, 0
        self.done, self.lr = 0.0, 0.0
        self.timer, self.signals = TrainingTimer(), SignalHandler()
        self._score: Record = {}
        self._codec = TextCodec(setup.tokenizer)
        self._unlogged: list[float] = []  # losses since the last record
        self._last_record = (0.0, 0)  # its seconds and tokens
        self._recent: deque[float] = deque(maxlen=_BASELINE_LOSSES + _LATEST_LOSSES)
        self._pending: tuple[int, Tensor] | None = None  # step and loss still on the device
        self._states: list[StackState | None] = [None] * setup.train.accumulate  # carried, of each micro-batch
        self._batches: deque[tuple[int, list[Batch]]] = deque(maxlen=_LATEST_LOSSES + 1)

    def run(self) -> Record:
        """Train, save and evaluate.

        Returns:
            The last evaluation.

        Raises:
            StoppedError: A signal, a diverging loss or a lack of memory ended the run.
            OSError: The folder of the run is not writable, or the disk is too full.
        """
        setup = self.setup
        check_writable(setup.run, 2 * checkpoint_bytes(setup.model))
        self._start()
        try:
            with self.signals.installed():
                self._train()
            self._log()
            self._evaluate()
            self._save()
        except torch.OutOfMemoryError as error:
            raise StoppedError(out_of_memory_message(error, setup.train), 4) from error
        finally:
            self.logger.close()
        return self._score

    def _start(self) -> None:
        setup = self.setup
        setup.objective.train()
        if setup.saved is None:
            torch.manual_seed(derive_seed(setup.train.seed, setup.shape.process))  # for dropout
        else:
            self._restore(setup.saved)
        if setup.accelerator.is_main_process:
            truncate_records(setup.run, self.step if setup.saved is not None else -1)
            write_atomically(setup.run / RUN, json.dumps(setup.metadata, indent=1) + "\n")
        setup.accelerator.wait_for_everyone()

    def _train(self) -> None:
        warmup = WARMUP_STEPS if self.setup.metadata["compiled"] else 0
        while self._continues():
            if warmup:
                with self.timer.paused():
                    self.train_step()
                    self.read_loss()
                warmup, self._last_record = warmup - 1, (self.timer.seconds, self.tokens)
            else:
                self.train_step()
            self._after_step()
        self.read_loss()

    def _continues(self) -> bool:
        """Return whether to run another step: the same in every process."""
        received, train = self.signals.received, self.setup.train
        signaled, seconds = self._sum(float(received), self.timer.seconds / self.setup.shape.processes)
        by_steps = 0.0 if train.steps is None else self.step / train.steps
        by_time = 0.0 if train.minutes is None else seconds / (60 * train.minutes)
        self.done = max(by_steps, by_time)
        if signaled:
            self.read_loss()
            self._save()
            name = signal.Signals(received or signal.SIGTERM).name
            raise StoppedError(f"{name}: saved at step {self.step}; run the same command to resume", 128 + received)
        return self.done < 1

    def train_step(self) -> None:
        """Run one step: accumulate the gradients of all micro-batches, clip them and update the weights."""
        setup, train = self.setup, self.setup.train
        if setup.redraws.before_step(self.step, train.accumulate):
            self._states = [None] * train.accumulate
        batches = self._next_batches()
        self._batches.append((self.step, batches))
        (num_targets,) = self._sum(float(sum(batch.num_targets for batch in batches)))
        num_targets = max(num_targets, 1.0)
        total = torch.zeros((), device=self.device)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            with contextlib.nullcontext() if last else setup.accelerator.no_sync(setup.wrapped):
                loss = self._loss(micro, batch.to(self.device))
                # Gradients are averaged over processes, which differ in their number of targets.
                setup.accelerator.backward(loss * (batch.num_targets * setup.shape.processes / num_targets))
            total += loss.detach() * batch.num_targets
        if train.clip:
            setup.accelerator.clip_grad_norm_(setup.objective.parameters(), train.clip)
        self.lr = learning_rate(train, self.step, self.done)
        for group in setup.optimizer.param_groups:
            group["lr"] = self.lr
        setup.optimizer.step()
        setup.optimizer.zero_grad(set_to_none=True)
        if setup.shape.processes > 1:
            total = setup.accelerator.reduce(total)
        self.step += 1
        self.tokens += setup.shape.num_sequences * train.context
        previous, self._pending = self._pending, (self.step, total / num_targets)
        if previous is not None:
            self._observe(*previous)
        if self.device.type != "cuda":  # On a GPU, reading this loss now would wait for the step to finish.
            self.read_loss()

    def _next_batches(self) -> list[Batch]:
        setup, train = self.setup, self.setup.train
        batches = setup.batches.next_step()
        if train.objective != "masked":
            return batches
        masked = []
        for micro, batch in enumerate(batches):
            rows = setup.shape.micro_batch(micro)
            seeds = [derive_seed(train.seed, self.step, row) for row in range(rows.start, rows.stop)]
            masked.append(mask_tokens(batch, train.mask_rate, setup.store.vocab_size, seeds))
        return masked

    def _loss(self, micro: int, batch: Batch) -> Tensor:
        state = self._states[micro]
        if self.setup.train.carry_state:
            assert batch.new_document is not None
            if state is None:
                state = self._new_state(len(batch.new_document))
            elif batch.new_document.any():
                rows = batch.new_document.nonzero()[:, 0]
                state = state.put(rows, self._new_state(len(rows)))
        loss, state = self.setup.wrapped(batch.tokens, batch.targets, batch.offsets, batch.key_mask, state)
        self._states[micro] = None if state is None else state.detach()
        return loss

    def _new_state(self, batch_size: int) -> StackState:
        assert isinstance(self.setup.model, LanguageModel)
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = dtypes.get(self.setup.accelerator.mixed_precision)
        return self.setup.model.new_state(batch_size, device=self.device, dtype=dtype)

    def _sum(self, *values: float) -> list[float]:
        """Return the sum of each value over the processes."""
        if self.setup.shape.processes == 1:
            return list(values)
        # float64 represents token counts exactly up to 2^53.
        return self.setup.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def read_loss(self) -> None:
        """Wait for the loss of the last step and check it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._observe(*pending)

    def _observe(self, step: int, loss: Tensor) -> None:
        value = float(loss)
        if not math.isfinite(value):
            raise self._bad_batch(step, f"the loss of step {step} is {value}")
        self._unlogged.append(value)
        self._recent.append(value)
        limit, latest = self._loss_limit(), list(self._recent)[-_LATEST_LOSSES:]
        if mean(latest) > limit:
            first = step - _LATEST_LOSSES + 1 + next(i for i, x in enumerate(latest) if x > limit)
            average = f"the mean of the last {_LATEST_LOSSES} losses is {mean(latest):.4g}, the limit {limit:.4g}"
            raise self._bad_batch(first, f"the loss has diverged since step {first}: {average}")
        self.logger.progress(self.done, self._metrics(value))

    def _loss_limit(self) -> float:
        """Return the mean of the latest losses above which the run is diverging."""
        baseline, factor = list(self._recent)[:-_LATEST_LOSSES], self.setup.train.divergence
        return factor * mean(baseline) if factor and len(baseline) == _BASELINE_LOSSES else math.inf

    def _bad_batch(self, step: int, message: str) -> StoppedError:
        """Save the batch of a step and return the error that refers to it."""
        shape = self.setup.shape
        batches = next((found for number, found in self._batches if number == step - 1), [])
        path = self.setup.run / (BAD_BATCH if shape.processes == 1 else f"bad-batch-{shape.process}.pt")
        torch.save({"step": step, "batches": [vars(batch) for batch in batches]}, path)
        return StoppedError(
            f"{message}; the batch of that step is in {path}, the last checkpoint is unchanged; "
            "lower --lr, or increase --warmup",
            3,
        )

    def _after_step(self) -> None:
        train = self.setup.train
        if self.step % train.log_every == 0 or self.step == 1:
            self.read_loss()
            self._log()
        if self.step % train.eval_every == 0 and self.done < 1:
            self.read_loss()
            self._evaluate()
        if self.step % train.save_every == 0:
            self.read_loss()
            if self._recent[-1] <= self._loss_limit():  # Do not save a model that may be diverging.
                self._save()

    def _metrics(self, loss: float) -> Record:
        seconds, causal = self.timer.seconds, self.setup.train.objective == "causal"
        before, tokens_before = self._last_record
        return {
            "step": self.step,
            "steps": self.setup.train.steps,
            "loss": loss,
            "bits_per_byte": self.setup.store.bits_per_byte(loss) if causal else None,
            "lr": self.lr,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": (self.tokens - tokens_before) / max(seconds - before, 1e-9),
            "memory": memory_used(self.device),
            "eta": seconds * (1 - self.done) / self.done if self.done else None,
        }

    def _log(self) -> None:
        if self._unlogged:
            record = self._metrics(mean(self._unlogged))
            self._unlogged, self._last_record = [], (record["seconds"], record["tokens"])
            self.logger.log_metrics(record)

    def _evaluate(self) -> None:
        """Evaluate the held-out data and generate a sample, unless this step was evaluated before."""
        setup = self.setup
        if self._score.get("step") == self.step:
            return
        names = {"step": self.step, "steps": setup.train.steps, "tokens": self.tokens, "seconds": self.timer.seconds}
        with self.timer.paused():
            found = evaluate_held_out(setup.objective, setup.store, setup.shape, setup.train, setup.accelerator)
            self._score = names | found
            if found:
                self.logger.log_metrics(self._score)
            can_sample = setup.accelerator.is_main_process and not self.sharded
            if can_sample and setup.train.sample_tokens and setup.train.objective == "causal":
                self.logger.log_sample({"step": self.step, **self._sample()})

    def _sample(self) -> Record:
        setup, train = self.setup, self.setup.train
        assert isinstance(setup.model, LanguageModel)
        prompt = self._codec.encode(train.prompt.encode())
        if not prompt:
            segments = setup.store.held_out if len(setup.store.held_out) else setup.store.train
            start = int(segments.start[0])
            prompt = setup.store.tokens[start : start + min(64, int(segments.length[0]))].tolist()
        sampling = Sampling(temperature=0.8, top_p=0.95)
        generated = generate(setup.model, prompt, train.sample_tokens, sampling=sampling, seed=train.seed)
        return {"prompt": self._codec.decode(prompt), "text": self._codec.decode(generated.tokens[0])}

    def _save(self) -> None:
        setup = self.setup
        model = gather_model(setup.objective) if self.sharded else setup.model
        optimizer, scaler = setup.optimizer.optimizer, setup.accelerator.scaler
        states = [None if state is None else pack_state(state) for state in self._states]
        # Runs of earlier versions are resumed, so these names are part of the file format.
        training: Record = {
            "about": setup.metadata,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.timer.seconds,
            "window": self._unlogged,
            "recent": list(self._recent),
            "mark": list(self._last_record),
            "position": setup.batches.state_dict(),
            "optimizer": gather_optimizer(setup.objective, optimizer) if self.sharded else optimizer.state_dict(),
            "sharded": self.sharded,
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": gather_object([random_states(self.device)]),
            "carried": gather_object([states]),
            "score": self._score,
        }
        with self.timer.paused():
            if setup.accelerator.is_main_process:
                save_checkpoint(setup.run, model, training, setup.tokenizer)
            setup.accelerator.wait_for_everyone()

    def _restore(self, saved: Record) -> None:
        setup, shape = self.setup, self.setup.shape
        self.step, self.tokens, self._score = saved["step"], saved["tokens"], saved["score"]
        self._unlogged, self._last_record = list(saved["window"]), tuple(saved["mark"])
        self._recent.extend(saved["recent"])
        self.timer = TrainingTimer(saved["seconds"])
        setup.batches.load_state_dict(saved["position"])
        if saved["sharded"] != self.sharded:
            before, now = ("with", "without") if saved["sharded"] else ("without", "with")
            raise ValueError(f"the run was saved {before} FSDP: resume it {before} FSDP too, not {now}")
        if self.sharded:
            load_optimizer(setup.objective, setup.optimizer.optimizer, saved["optimizer"])
        else:
            setup.optimizer.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"] is not None and setup.accelerator.scaler is not None:
            setup.accelerator.scaler.load_state_dict(saved["scaler"])
        if len(saved["random"]) == shape.processes:
            set_random_states(saved["random"][shape.process], self.device)
        else:
            torch.manual_seed(derive_seed(setup.train.seed, shape.process, self.step))
        if setup.train.carry_state:
            if len(saved["carried"]) != shape.processes:
                raise ValueError(
                    f"the run carries recurrent states of {len(saved['carried'])} processes, this command has "
                    f"{shape.processes}: resume it with the same number"
                )
            packed = saved["carried"][shape.process]
            self._states = [None if x is None else unpack_state(x, self._new_state(shape.batch_size)) for x in packed]
        self.logger.info(f"resuming from step {self.step}")
