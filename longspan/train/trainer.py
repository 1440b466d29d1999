"""The training loop: steps, evaluation, checkpoints, and what happens after signals and errors."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from longspan.distributed.checkpoint import AsyncSaver, load_sharded
from longspan.distributed.mesh import Mesh, shard_weights
from longspan.generation.generate import generate
from longspan.generation.sampling import Sampling
from longspan.generation.tokenization import TextCodec
from longspan.models.checkpoint import LAST, committed_folder, describe, find_checkpoint, previous_folder
from longspan.models.residual import StackState
from longspan.models.transformer import Classifier, LanguageModel
from longspan.train import lora, run_checkpoint, run_folder, setup
from longspan.train.config import Settings, described
from longspan.train.data.batches import Batch, BatchShape, derive_seed
from longspan.train.evaluation import evaluate_held_out
from longspan.train.float8 import convert_to_float8_training
from longspan.train.fsdp import (
    gather_model,
    gather_optimizer,
    load_optimizer,
    local_part,
    register_methods,
    uses_fsdp,
)
from longspan.train.initial import start_from
from longspan.train.loggers import Logger, Record, memory_used, truncate_records
from longspan.train.objectives import mask_tokens, wrap_model
from longspan.train.signals import (
    InterruptedWorkError,
    SignalHandler,
    StoppedError,
    TrainingTimer,
    out_of_memory_message,
)
from longspan.utils import write_atomically

WARMUP_STEPS = 3  # steps in which torch.compile compiles, runs eagerly once and captures CUDA graphs
# Divergence compares the mean of the latest losses with that of the losses before them.
_BASELINE_LOSSES, _LATEST_LOSSES = 50, 10
BAD_BATCH = "bad-batch.pt"


class HostCopy:
    """A number of the device on its way to the host.

    `float(x)` copies after all work in the queue, and so waits for the steps that were launched since; this waits for
    the work that was launched before.

    Args:
        x: A tensor of one number.
    """

    def __init__(self, x: Tensor) -> None:
        self.copied = x.to("cpu", non_blocking=x.is_cuda)
        self.done = None
        if x.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record(torch.cuda.current_stream(x.device))

    def value(self) -> float:
        """Wait for the copy and return the number."""
        if self.done is not None:
            self.done.synchronize()
        return float(self.copied)


class Trainer:
    """Builds the data, model and optimizer of a run, or restores them from its checkpoint, and trains the model.

    Args:
        settings: The settings of the run.
        logger: Receives metrics and messages.
        accelerator: Device, precision and processes.
        mesh: The processes by axis, for --mesh.
        data_folder: Where to store tokens. Default: the folder `data` of the run, which the caller must have locked.

    Attributes:
        metadata: Contents of `run.json`.
        batches: Training batches.
        objective: The model with its loss, to evaluate and save.
        step: Steps done.
        tokens: Tokens read in these steps.
        done: Fraction of the run that is done, from 0 to 1.

    Raises:
        ValueError: Settings and data do not fit together, or differ from those of the run in `--out`, or a file of
            that run is damaged.
    """

    def __init__(
        self,
        settings: Settings,
        logger: Logger,
        accelerator: Accelerator,
        mesh: Mesh | None = None,
        data_folder: Path | None = None,
    ) -> None:
        config = self.config = settings.train
        self.logger, self.accelerator, self.device, self.mesh = logger, accelerator, accelerator.device, mesh
        self.folder = Path(config.out)
        self.processes, self.process = accelerator.num_processes, accelerator.process_index
        readers = (self.processes, self.process) if mesh is None else (mesh.shape.data_ranks, mesh.data_rank)
        self.shape = BatchShape(config.context, config.batch_size, config.accumulate, *readers)
        model = setup.in_every_process(accelerator, lambda: self._load_checkpoint(settings))
        sha256 = None if self._saved is None else self._saved["about"]["data"]["sha256"]
        folder = self.folder / run_folder.DATA if data_folder is None else data_folder
        self.store = setup.open_data(config, folder, logger, accelerator, sha256)
        digest, step = self.store.metadata["sha256"], None if self._saved is None else self._saved["step"]
        setup.check_equal(accelerator, {"data": digest, "checkpoint": step}, "data or checkpoints")
        packed = setup.is_packed(config, self.store)
        self.batches = setup.make_batches(config, self.store, self.shape, packed)
        self._build_model(settings, model, setup.is_compiled(config, packed, self.device, mesh))
        self.step, self.tokens = 0, 0
        self._saved_at: tuple[int, int | None] | None = None  # the step of the last checkpoint and of its evaluation
        self._between_steps = True
        self.done, self.lr = 0.0, 0.0
        self.timer, self.signals = TrainingTimer(), SignalHandler()
        self._score: Record = {}
        self._tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
        self._codec = TextCodec(self._tokenizer)
        self._unlogged: list[float] = []  # losses since the last record
        self._last_record = (0.0, 0)  # its seconds and tokens
        self._recent: deque[float] = deque(maxlen=_BASELINE_LOSSES + _LATEST_LOSSES)
        self._pending: tuple[int, HostCopy] | None = None  # a step whose loss has not been read
        self._states: list[StackState | None] = [None] * config.accumulate  # carried state of each micro-batch
        # Batches of the latest steps, of which one is saved if the loss diverges.
        self._batches: deque[tuple[int, list[Batch]]] = deque(maxlen=_LATEST_LOSSES + 1)

    def _load_checkpoint(self, settings: Settings) -> LanguageModel | Classifier | None:
        """Return the model of the last checkpoint, if there is one and the settings are those of its run."""
        self._saved: Record | None = None
        self._trained: list[str] = []  # parameters that are trained as a whole beside LoRA
        self._changes: list[str] = []
        checkpoint = run_checkpoint.load(self.folder, self.process, self.processes)
        if checkpoint is None:
            return None
        model, self._saved = checkpoint
        about = self._saved["about"]
        now = described(settings, settings.complete_for(about["data"]))
        self._changes = run_checkpoint.check_settings(self.folder, about, now, self.shape.processes)
        assert isinstance(model, LanguageModel | Classifier | None)
        return model

    def _build_model(self, settings: Settings, model: LanguageModel | Classifier | None, compiled: bool) -> None:
        config = self.config
        model_config = settings.complete_for(self.store.metadata)
        setup.check_model(config, model_config)
        self.metadata = setup.run_metadata(settings, model_config, self.store, self.accelerator, self.shape)
        torch.manual_seed(config.seed)
        if model is None:
            model = (
                LanguageModel(model_config)
                if self.store.task is None
                else setup.make_classifier(model_config, self.store)
            )
            if config.initial is not None and self._saved is None:
                found = start_from(model, config.initial)
                self._trained = [*found.new, *found.partly]
                self.logger.info(str(found))
        if config.lora_rank is not None:
            self._add_lora(model)
        if config.carry_state:
            assert isinstance(model, LanguageModel)
            setup.check_documents(model, self.store)
        setup.freeze(model, config.freeze)
        if config.precision == "fp8":
            number = convert_to_float8_training(model)
            self.logger.info(f"{number} linear layers compute FP8 products")
        cp = None if self.mesh is None else self.mesh.cp
        self.objective = wrap_model(model, config.context, config.chunk_length, cp, self.store.task)
        self.metadata |= {"parameters": sum(p.numel() for p in self.objective.parameters()), "compiled": compiled}
        self.redraws = setup.RedrawSchedule(self.model, config.seed)
        self.sharded = self.mesh is not None or uses_fsdp(self.accelerator)
        if self.mesh is None:
            optimizer = setup.make_optimizer(config, self.objective)
            self.wrapped, self.optimizer = self.accelerator.prepare(self.objective, optimizer)
        else:
            self.wrapped, self.optimizer = self._shard_model(self.mesh)
        if self.sharded:
            self.objective = self.wrapped
            register_methods(self.wrapped)
        if compiled:
            mode = setup.compile_mode(config, self.device)
            self.wrapped = torch.compile(self.wrapped, dynamic=False, mode=mode)

    def _add_lora(self, model: LanguageModel | Classifier) -> None:
        """Put LoRA beside the layers of the model: new, or that of the checkpoint."""
        if uses_fsdp(self.accelerator):
            raise ValueError("--lora-rank cannot be combined with FSDP of accelerate: leave one of them out")
        names = dict(model.named_parameters())
        self._trained = [name for name in self._trained if name in names]
        if self._saved is not None:
            self._trained = self._saved["trained"]
        about = lora.add_lora(model, self.config, self._trained)
        if self._saved is None:
            self.logger.info(about)
        else:
            lora.load_lora(model, self._saved["adapter"])

    def _shard_model(self, mesh: Mesh) -> tuple[Any, Any]:
        """Return the objective with sharded weights, and its optimizer."""
        self._saver, self._description = AsyncSaver(), describe(self.model) | self._task_description()
        wrapped: Any = self.objective.to(self.device)
        shard_weights(wrapped, mesh)
        return wrapped, self.accelerator.prepare_optimizer(setup.make_optimizer(self.config, wrapped))

    def _task_description(self) -> Record:
        return {} if self.store.task is None else self.store.task.description()

    @property
    def model(self) -> LanguageModel | Classifier:
        """The model inside the objective."""
        return self.objective.model

    def run(self) -> Record:
        """Train, save and evaluate.

        Returns:
            The last evaluation.

        Raises:
            StoppedError: A signal, a diverging loss or a lack of memory ended the run.
            OSError: The folder of the run is not writable, or the disk is too full.
        """
        last = self.folder / LAST
        number = 1 + sum(not folder.is_dir() for folder in (last, previous_folder(last)))
        run_folder.check_writable(self.folder, number * run_checkpoint.size_in_bytes(self.model))
        self._start()
        try:
            with self.signals.installed():
                self._train()
                self._log()
                self._save_if_changed()
                self._evaluate()
                if self._score.get("step") != self.step:  # A signal interrupted the evaluation.
                    self._stop()
                self._save_if_changed()
                self._finish_saving()
        except StoppedError:
            with contextlib.suppress(Exception):
                self._finish_saving()
            raise
        except Exception as error:
            if self._between_steps and self.processes == 1:
                with contextlib.suppress(Exception):
                    self._save()
            if isinstance(error, torch.OutOfMemoryError):
                raise StoppedError(out_of_memory_message(error, self.config), 4) from error
            raise
        finally:
            self.logger.close()
        return self._score

    def _start(self) -> None:
        self.objective.train()
        if self._saved is None:
            torch.manual_seed(derive_seed(self.config.seed, self.process))  # of dropout
        else:
            self._restore(self._saved)
        if self.accelerator.is_main_process:
            evaluated = self._score.get("step") == self.step
            resumed = self._saved is not None
            truncate_records(self.folder, self.step if resumed else -1, logged=not self._unlogged, evaluated=evaluated)
            write_atomically(self.folder / run_folder.RUN, json.dumps(self.metadata, indent=1) + "\n")
        self.accelerator.wait_for_everyone()

    def _train(self) -> None:
        warmup = WARMUP_STEPS if self.metadata["compiled"] else 0
        if self._saved is not None and self._is_due(self.config.eval_every):
            self._evaluate()  # A signal interrupted this evaluation.
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
        config = self.config
        stopped, seconds = self._sum(float(self._received()), self.timer.seconds / self.shape.processes)
        if stopped:
            self._stop()
        by_steps = 0.0 if config.steps is None else self.step / config.steps
        by_time = 0.0 if config.minutes is None else seconds / (60 * config.minutes)
        self.done = max(by_steps, by_time)
        return self.done < 1

    def _received(self) -> int:
        """Return the termination signal that was received, SIGPIPE if the output pipe is closed, or 0."""
        return self.signals.received or (signal.SIGPIPE if self.logger.closed else 0)

    def _stop(self) -> NoReturn:
        """Save and end after a signal, in every process."""
        self.read_loss()
        self._save_if_changed()
        self._finish_saving()
        number = self._received() or signal.SIGTERM
        name = signal.Signals(number).name
        raise StoppedError(f"{name}: saved at step {self.step}; run the same command to resume", 128 + number)

    def train_step(self) -> None:
        """Run one step: accumulate the gradients of all micro-batches, clip them and update the weights."""
        self._between_steps = False
        if self.redraws.before_step(self.step, self.config.accumulate):
            self._states = [None] * self.config.accumulate
        repeated = self.batches.repetition > 0
        batches = self._next_batches()
        repetition = self.batches.repetition
        if repetition and not repeated:
            self._announce_repetition()
        self._batches.append((self.step, batches))
        (num_targets,) = self._sum(float(sum(batch.num_targets for batch in batches)))
        num_targets = max(num_targets, 1.0)
        total = torch.zeros((), device=self.device)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            with self._synchronizing(last):
                loss = self._loss(micro, batch.to(self.device))
                # Gradients are averaged over processes, which differ in their number of targets.
                self.accelerator.backward(loss * (batch.num_targets * self.processes / num_targets))
            total += loss.detach() * batch.num_targets
        if self.config.clip:
            self.accelerator.clip_grad_norm_(self.objective.parameters(), self.config.clip)
        self.lr = setup.learning_rate(self.config, self.step, self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group.get("lr_ratio", 1.0)
            if group.get(setup.NGRAMS):
                group["weight_decay"] = setup.ngram_weight_decay(self.config, self.step + 1, repetition)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.processes > 1:
            total = self.accelerator.reduce(total) / self.objective.ranks_per_batch
        self.step += 1
        self.tokens += len(batches) * self.shape.batch_size * self.shape.processes * self.config.context
        pending = self.step, HostCopy(total / num_targets)
        self.read_loss()
        self._pending = pending
        if self.device.type != "cuda":  # On a GPU, reading this loss now would wait for the step to finish.
            self.read_loss()
        self._between_steps = True

    def _announce_repetition(self) -> None:
        decays = any(group.get(setup.NGRAMS) for group in self.optimizer.param_groups)
        more = ", and n-gram tables decay (--ngram-decay)" if decays else ""
        what = "all training data" if self.batches.epochs > 1 else "a source of the training data"
        self.logger.info(f"step {self.step + 1}: {what} was read once; it is repeated from here on{more}")

    def _synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: only the gradients of the last one are summed over processes."""
        if self.mesh is not None:
            self.wrapped.set_requires_gradient_sync(last)
            return self.accelerator.autocast()
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def _next_batches(self) -> list[Batch]:
        batches = self.batches.next_step(setup.batches_per_step(self.config, self.done))
        if self.config.objective != "masked":
            return batches
        masked = []
        for micro, batch in enumerate(batches):
            indices = range(self.shape.num_sequences)[self.shape.micro_batch(micro)]
            seeds = [derive_seed(self.config.seed, self.step, index) for index in indices]
            masked.append(mask_tokens(batch, self.config.mask_rate, self.store.vocab_size, seeds))
        return masked

    def _loss(self, micro: int, batch: Batch) -> Tensor:
        state = self._states[micro]
        if self.config.carry_state:
            assert batch.new_document is not None
            if state is None:
                state = self._new_state(len(batch.new_document))
            elif batch.new_document.any():
                sequences = batch.new_document.nonzero()[:, 0]
                # Buffers of every token then have the length of the longest document, not of all before.
                state = state.put(sequences, self._new_state(len(sequences))).reserve(None)
        loss, state = self.wrapped(batch.tokens, batch.targets, batch.offsets, batch.key_mask, state)
        self._states[micro] = None if state is None else state.detach()
        return loss

    def _new_state(self, batch_size: int) -> StackState:
        assert isinstance(self.model, LanguageModel)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        return self.model.new_state(batch_size, device=self.device, dtype=dtype)

    def _sum(self, *values: float) -> list[float]:
        """Return the sum of each value over the processes, of those that share a batch over one."""
        if self.processes == 1:
            return list(values)
        # float64 represents token counts exactly up to 2^53.
        total = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device))
        return (total / self.objective.ranks_per_batch).tolist()

    def read_loss(self) -> None:
        """Wait for the loss of the last step and check it."""
        if self._pending is not None:
            (step, loss), self._pending = self._pending, None
            self._observe(step, loss.value())

    def _observe(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            raise self._bad_batch(step, f"the loss of step {step} is {value}")
        self._unlogged.append(value)
        self._recent.append(value)
        limit, latest = self._loss_limit(), list(self._recent)[-_LATEST_LOSSES:]
        if fmean(latest) > limit:
            first = step - _LATEST_LOSSES + 1 + next(i for i, x in enumerate(latest) if x > limit)
            average = f"the mean of the last {_LATEST_LOSSES} losses is {fmean(latest):.4g}, the limit {limit:.4g}"
            raise self._bad_batch(first, f"the loss has diverged since step {first}: {average}")
        self.logger.progress(self.done, self._metrics(value))

    def _loss_limit(self) -> float:
        """Return the mean of the latest losses above which the run is diverging."""
        baseline, factor = list(self._recent)[:-_LATEST_LOSSES], self.config.divergence
        return factor * fmean(baseline) if factor and len(baseline) == _BASELINE_LOSSES else math.inf

    def _bad_batch(self, step: int, message: str) -> StoppedError:
        """Save the batch of a step and return the error that refers to it."""
        batches = next((found for number, found in self._batches if number == step - 1), [])
        path = self.folder / (BAD_BATCH if self.processes == 1 else f"bad-batch-{self.process}.pt")
        torch.save({"step": step, "batches": [vars(batch) for batch in batches]}, path)
        kept = "no checkpoint was saved before"
        if self._saved_at is not None:
            kept = f"the last checkpoint, of step {self._saved_at[0]}, is unchanged"
        last, hint = self.folder / LAST, ""
        if previous_folder(last).is_dir():
            hint = f"; remove {last} to resume from the checkpoint before it"
        return StoppedError(
            f"{message}; the batch of that step is in {path}, {kept}; "
            f"lower {self._rates()}, or increase --warmup, and run the command again{hint}",
            3,
        )

    def _rates(self) -> str:
        """Return the flags of the learning rates of this run."""
        own = {"--muon-lr": self.config.muon_lr, "--embedding-lr": self.config.embedding_lr}
        return " and ".join(["--lr", *(flag for flag, rate in own.items() if rate is not None)])

    def _after_step(self) -> None:
        if self._is_due(self.config.log_every) or self.step == 1:
            self.read_loss()
            self._log()
        if self._is_due(self.config.eval_every) and self.done < 1:
            self.read_loss()
            self._evaluate()
        if self._is_due(self.config.save_every):
            self.read_loss()
            if self._recent[-1] <= self._loss_limit():  # Do not save a model that may be diverging.
                self._save()

    def _is_due(self, interval: int) -> bool:
        return self.step > 0 and self.step % interval == 0

    def _metrics(self, loss: float) -> Record:
        seconds, causal = self.timer.seconds, self.config.objective == "causal"
        before, tokens_before = self._last_record
        return {
            "step": self.step,
            "steps": self.config.steps,
            "loss": loss,
            "bits_per_byte": self.store.bits_per_byte(loss) if causal else None,
            "lr": self.lr,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": (self.tokens - tokens_before) / max(seconds - before, 1e-9),
            "memory": memory_used(self.device),
            "eta": max(0.0, seconds * (1 - self.done) / self.done) if self.done else None,
        }

    def _log(self) -> None:
        if self._unlogged:
            record = self._metrics(fmean(self._unlogged))
            self._unlogged, self._last_record = [], (record["seconds"], record["tokens"])
            self.logger.log_metrics(record)

    def _evaluate(self) -> None:
        """Evaluate the held-out data and generate a sample, unless this step was evaluated before.

        A signal interrupts this, for the run to be saved without delay. Several processes finish the evaluation.
        """
        if self._score.get("step") == self.step:
            return
        score = {"step": self.step, "steps": self.config.steps, "tokens": self.tokens, "seconds": self.timer.seconds}
        with (
            self.timer.paused(),
            contextlib.suppress(InterruptedWorkError),
            self.signals.interrupting() if self.processes == 1 else contextlib.nullcontext(),
        ):
            found = evaluate_held_out(self.objective, self.store, self.shape, self.config, self.accelerator)
            if found:
                self.logger.log_metrics(score | found)
            if self.config.sample_tokens and self.config.objective == "causal":
                model = gather_model(self.objective) if self.sharded else self.model
                if self.accelerator.is_main_process:
                    self.logger.log_sample({"step": self.step, **self._sample(model.to(self.device))})
            self._score = score | found

    def _sample(self, model: LanguageModel | Classifier) -> Record:
        assert isinstance(model, LanguageModel)
        prompt = self._codec.encode(self.config.prompt.encode())
        if not prompt:
            segments = self.store.held_out if len(self.store.held_out) else self.store.train
            start = int(segments.start[0])
            prompt = self.store.tokens[start : start + min(64, int(segments.length[0]))].tolist()
        number = self.config.sample_tokens
        try:
            model.check_length(len(prompt) + number)
        except ValueError:  # Positions end, though not before the context does.
            prompt = prompt[-max(1, self.config.context // 2) :]
            number = min(number, self.config.context - len(prompt))
        sampling = Sampling(temperature=0.8, top_p=0.95)
        generated = generate(model, prompt, number, sampling=sampling, seed=self.config.seed)
        return {"prompt": self._codec.decode(prompt), "text": self._codec.decode(generated.tokens[0])}

    def _save_if_changed(self) -> None:
        if self._saved_at != (self.step, self._score.get("step")):
            self._save()

    def _save(self) -> None:
        self._check_finite()
        keep = self._saved_at is not None and self._saved_at[0] != self.step
        with self.timer.paused():
            if self.mesh is not None:
                self._save_sharded(keep)
            else:
                self._save_whole(keep)
        self._saved_at = self.step, self._score.get("step")

    def _save_whole(self, keep: bool) -> None:
        """Write the checkpoint in the main process."""
        model = gather_model(self.objective) if self.sharded else self.model
        optimizer = self.optimizer.optimizer
        state = gather_optimizer(self.objective, optimizer) if self.sharded else optimizer.state_dict()
        training = self._training_state() | {"optimizer": state}
        if self.accelerator.is_main_process:
            more = self._task_description()
            if self.config.lora_rank is None:
                run_checkpoint.save(self.folder, model, training, self._tokenizer, keep=keep, more=more)
            else:
                self._save_with_adapter(model, training | {"trained": self._trained}, keep)
        self.accelerator.wait_for_everyone()

    def _save_with_adapter(self, model: LanguageModel | Classifier, training: Record, keep: bool) -> None:
        """Write the model without LoRA, and the adapter beside it."""
        adapter = lora.adapter_tensors(model, self._trained)
        more = self._task_description() | {"adapter": True}
        with lora.without_lora(model):
            run_checkpoint.save(
                self.folder,
                model,
                training,
                self._tokenizer,
                keep=keep,
                more=more,
                adapter=lambda folder: lora.write_adapter(adapter, self.config, self._trained, folder),
            )

    def _save_sharded(self, keep: bool) -> None:
        """Start to write a checkpoint in all processes."""
        self._finish_saving()
        training = self._training_state() | {"optimizer": None}
        checkpoint = run_checkpoint.ShardedCheckpoint(self.folder, self._tokenizer, keep=keep)
        setup.main_process_first(
            self.accelerator, lambda: checkpoint.open() if self.accelerator.is_main_process else None
        )

        def finish(digests: dict[str, str]) -> None:
            checkpoint.finish(digests, self._description, training)

        self._saver.save(checkpoint.folder, self.model, self.optimizer.optimizer, finish)

    def _finish_saving(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self.mesh is not None:
            self._saver.wait()
            self.accelerator.wait_for_everyone()  # The main process has replaced the last checkpoint.

    def _training_state(self) -> Record:
        """Return what the next step depends on besides the weights and the optimizer."""
        scaler = self.accelerator.scaler
        states = [None if state is None else run_checkpoint.pack_state(state) for state in self._states]
        # Runs of earlier versions are resumed, so these names are part of the file format.
        return {
            "about": self.metadata,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.timer.seconds,
            "window": list(self._unlogged),  # Sharded checkpoints are written while the run goes on.
            "recent": list(self._recent),
            "mark": list(self._last_record),
            "position": self.batches.state_dict(),
            "sharded": self.sharded,
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": gather_object([run_checkpoint.random_states(self.device)]),
            "carried": gather_object([states])[:: self.objective.ranks_per_batch],
            "score": self._score,
        }

    def _check_finite(self) -> None:
        """Raise StoppedError if the weights or the optimizer's moments are not finite in any process."""
        moments = [x for state in self.optimizer.optimizer.state.values() for x in state.values()]
        tensors = [local_part(x) for x in (*self.objective.parameters(), *moments) if isinstance(x, Tensor)]
        if any(self._sum(float(not all(bool(x.isfinite().all()) for x in tensors)))):
            raise self._bad_batch(self.step, f"the weights are not finite after step {self.step}")

    def _restore(self, saved: Record) -> None:
        self.step, self.tokens, self._score = saved["step"], saved["tokens"], saved["score"]
        self._saved_at = self.step, self._score.get("step")
        self._unlogged, self._last_record = list(saved["window"]), tuple(saved["mark"])
        self._recent.extend(saved["recent"])
        self.timer = TrainingTimer(saved["seconds"])
        self.batches.load_state_dict(saved["position"])
        optimizer = self.optimizer.optimizer
        ratios = [group.get("lr_ratio") for group in optimizer.param_groups]
        if saved["optimizer"] is None:
            load_sharded(committed_folder(find_checkpoint(self.folder).resolve()), self.model, optimizer)
        elif saved["sharded"] or self.sharded:
            load_optimizer(self.objective, optimizer, saved["optimizer"])
        else:
            optimizer.load_state_dict(saved["optimizer"])
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):  # Rates may be lower now.
            group.update({} if ratio is None else {"lr_ratio": ratio})
        if saved["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        if len(saved["random"]) == self.processes:
            run_checkpoint.set_random_states(saved["random"][self.process], self.device)
        else:
            torch.manual_seed(derive_seed(self.config.seed, self.process, self.step))
        if self.config.carry_state:
            if len(saved["carried"]) != self.shape.processes:
                raise ValueError(
                    f"the run carries recurrent states of {len(saved['carried'])} processes, this command has "
                    f"{self.shape.processes}: resume it with the same number"
                )
            for micro, packed in enumerate(saved["carried"][self.shape.process]):
                new = self._new_state(self.shape.batch_size)
                self._states[micro] = None if packed is None else run_checkpoint.unpack_state(packed, new)
        self.logger.info("; ".join([f"resuming from step {self.step}", *self._changes]))
