"""The run: stages one after another, checkpoints to resume from, the new model and the report."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.generation.tokenization import TOKENIZER
from longspan.hf.native import to_language_model, why_not_native
from longspan.hf.swap import UnsupportedModelError
from longspan.mechanisms.mixture import MixtureAttention
from longspan.models.adapter import ADAPTER, ADAPTER_CONFIG
from longspan.models.checkpoint import LAST, replace_folder, verify_checksums, write_checksums
from longspan.models.checkpoint import write as write_model
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.config import differences
from longspan.train.data.batches import derive_seed
from longspan.train.data.token_store import TokenStore
from longspan.train.fsdp import gather_optimizer, is_sharded, load_optimizer
from longspan.train.linearize.config import FREE, STAGES, LinearizeConfig
from longspan.train.linearize.data import (
    MixedWindows,
    Windows,
    concatenated,
    mask_tokens,
    next_tokens,
    read_texts,
    repeat_passages,
)
from longspan.train.linearize.evaluation import evaluate, perplexity
from longspan.train.linearize.processes import Processes, whole_tensors
from longspan.train.linearize.sampling import sample_text
from longspan.train.linearize.stages import AttentionTransfer, Distillation, compile_layers, replacement_damage
from longspan.train.linearize.student import (
    add_adapters,
    added_parameters,
    build_student,
    save_adapters,
    set_checkpointing,
    swapped_layers,
)
from longspan.train.linearize.teacher import Teacher, load_teacher
from longspan.train.loggers import Logger, Record, RunLogger, format_duration, memory_used, truncate_records
from longspan.train.lora import lora_layers, remove_lora
from longspan.train.run_folder import DATA, RUN, check_shared, cleaned, locked
from longspan.train.signals import SignalHandler, StoppedError
from longspan.utils import read_json, write_atomically

RESUME, STUDENT, TRAINING, REPORT = "resume", "student.safetensors", "training.pt", "report.html"
LOG_STEPS = 10
COMPILED_STEPS = 200  # steps from which a stage is compiled, without --minutes


def linearize(settings: LinearizeConfig) -> None:
    """Run the command.

    Raises:
        ValueError: The model, the data or the settings are wrong; nothing was written.
        StoppedError: A signal ended the run, which can be resumed.
    """
    processes = Processes(settings.device)
    processes.check_equal(vars(settings), "settings")
    if settings.batch_size % processes.number:
        raise ValueError(
            f"--batch-size {settings.batch_size} cannot be divided among {processes.number} processes: use a multiple"
        )
    teacher = processes.in_every(lambda: load_teacher(settings.model))
    torch.manual_seed(settings.seed)
    try:
        student = build_student(teacher.model, settings.mechanism, settings.keep_layers)
    except UnsupportedModelError as error:
        reason = str(error).replace("name the other layers in `layers`", "name such layers in --keep-layers")
        reason = reason.replace("set config.attn_logit_softcapping to None", "set that to null in its config.json")
        raise ValueError(f"--model {settings.model}: {reason}") from None
    _check_window(student, settings.context)
    if settings.transfer_steps and not added_parameters(student):
        raise ValueError(
            f"the mechanism {settings.mechanism!r} adds no parameters, so that there is nothing to train in the first "
            "stage: use --transfer-steps 0"
        )
    depth = teacher.model.config.get_text_config().num_hidden_layers
    if settings.keep >= depth:
        raise ValueError(f"--keep {settings.keep} leaves nothing to replace: the model has {depth} layers")
    if teacher.encoder and (settings.sampled_tokens or settings.repeat_share):
        raise ValueError("an encoder neither writes nor recalls text: leave out --sampled-tokens and --repeat-share")
    tensorboard = settings.tensorboard and not settings.dry_run
    logger = RunLogger(settings.out, tensorboard=tensorboard) if processes.main else Logger()
    with ExitStack() as stack:
        stack.callback(logger.close)
        out = processes.main_first(lambda: _open_folder(settings, processes, stack, logger))
        store = processes.main_first(lambda: _read(settings, teacher, out, processes, logger))
        run = LinearizeRun(settings, out, teacher, student, store, logger, processes)
        for line in run.describe():
            logger.info(line)
        if not settings.dry_run:
            run.run()
    processes.end()


def _check_window(student: Any, context: int) -> None:
    """Refuse sequences that a window covers: memories would learn nothing."""
    window = max((m.window for m in student.modules() if isinstance(m, MixtureAttention)), default=0)
    if context <= window:
        raise ValueError(
            f"--context {context} is not longer than the window of {window} tokens, so that memories would stay empty: "
            f"use a longer --context, or a smaller window, as in --mechanism "
            f'\'{{"mechanism": "mixture", "window": {max(1, context // 4)}}}\''
        )


def _open_folder(settings: LinearizeConfig, processes: Processes, stack: ExitStack, logger: Logger) -> Path:
    """Return the folder to write to, locked by the main process; for a dry run a temporary one of each process."""
    if settings.dry_run:
        return Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if processes.main:
        stack.enter_context(locked(settings.out, logger.info))
    else:
        check_shared(settings.out, main=False)
        stack.enter_context(cleaned(settings.out))
    return settings.out


def _read(settings: LinearizeConfig, teacher: Teacher, out: Path, processes: Processes, logger: Logger) -> TokenStore:
    tokenizer = out / DATA / TOKENIZER
    if processes.main or settings.dry_run:
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        teacher.tokenizer.save_pretrained(tokenizer.parent)
    return read_texts(settings, tokenizer, out / DATA / "tokens", logger)


class LinearizeRun:
    """A run and what it resumes from.

    Args:
        settings: The settings.
        out: The folder of the run.
        teacher: The teacher.
        student: The student, new.
        store: The text.
        logger: Receives messages and metrics.
        processes: Those that run together, and their devices.
    """

    def __init__(
        self,
        settings: LinearizeConfig,
        out: Path,
        teacher: Teacher,
        student: Any,
        store: TokenStore,
        logger: Logger,
        processes: Processes,
    ) -> None:
        self.settings, self.out, self.logger = settings, out, logger
        self.processes, self.device = processes, processes.device
        self.teacher, self.encoder = teacher, teacher.encoder
        # Models in one piece on the CPU, for the report, where those in use are sharded.
        self.whole: dict[str, Any] = {}
        self.student = student.to(self.device)
        self._place("teacher", teacher.model)
        self.text, self.held_out = concatenated(store, store.train), concatenated(store, store.held_out)
        self.store, self.signals = store, SignalHandler()
        # What a checkpoint holds beside the student's weights and the optimizer.
        self.stage, self.step = 0, 0
        self.seconds, self.tokens = dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0)
        self.kept: tuple[int, ...] | None = None  # layers that --keep chose
        self.sampled, self.sampled_seconds = np.zeros(0, np.int64), 0.0
        self.teacher_perplexity: float | None = None
        self.compiled = False

    def _place(self, name: str, model: Any) -> None:
        """Move a model to the device; where there are several processes, shard it, and store it in the main one."""
        if self.processes.number > 1:
            self.whole[name] = copy.deepcopy(model).cpu() if self.processes.main else None
            self.processes.shard_layers(model.to(self.device))
        model.to(self.device)

    def describe(self) -> Iterator[str]:
        """Yield lines about the models, the data and the stages."""
        layers, steps = swapped_layers(self.student), self.settings.steps
        first = next(iter(layers.values())).mechanism
        new = sum(x.numel() for x in added_parameters(self.student).values())
        total = sum(x.numel() for x in self.teacher.model.parameters())
        name = self.teacher.model.config.model_type
        yield f"teacher: {name}, {total:,} parameters; {len(layers)} layers get {first.__class__.__name__} (+{new:,})"
        sizes = [x.numel() * x.element_size() for x in first.new_state(1).tensors().values()]
        key_values = 2 * first.num_kv_heads * first.head_dim * 4
        yield (
            f"state of one replaced layer and sequence: {sum(sizes) / 1024:,.0f} KiB; softmax attention stores that "
            f"for {sum(sizes) // key_values:,} tokens"
        )
        if self.settings.keep:
            yield f"{self.settings.keep} layers keep softmax attention, chosen after the first stage"
        yield f"data: {len(self.text):,} tokens to train on, {len(self.held_out):,} to evaluate on"
        if self.settings.sampled_tokens:
            time = "" if self.settings.minutes is None else f", at most {format_duration(30 * self.settings.minutes)}"
            yield (
                f"sample: {self.settings.sampled_tokens:,} tokens that the teacher writes{time}; "
                f"{100 * self.settings.sampled_share:.0f} % of the sequences are of these"
            )
        for stage, number in steps.items():
            if number:
                rows, context = self._shape(stage)
                time = "" if self.settings.minutes is None else f", {format_duration(60 * self._share(stage))}"
                micro, recompute = self._micro_batch(stage)
                yield (
                    f"{stage}: {number:,} steps of {rows} × {context:,} tokens{time}, {micro} sequences at a time"
                    + (", activations recomputed" if recompute else "")
                )

    def run(self) -> None:
        """Run or resume all stages, then write the model and the report."""
        self._check_settings()
        if (self.out / RUN).exists() and not (self.out / RESUME).exists() and (self.out / LAST).exists():
            self.logger.info(f"{self.out} is complete: {self.out / LAST} is the model")
            return
        if self.processes.main:
            self._write_metadata()
        with self.signals.installed():
            state = self._load()
            resumed = self.stage
            self.processes.main_first(self._sample)
            self.teacher_perplexity = self._perplexity(self.teacher.model)
            for index, stage in enumerate(STAGES):
                if index >= self.stage and self.settings.steps[stage]:
                    self._run_stage(index, stage, state if index == resumed else None)
        self._finish()

    def _run_stage(self, index: int, stage: str, optimizer_state: Any) -> None:
        settings = self.settings
        if index != self.stage:
            self.stage, self.step = index, 0
        if settings.keep and self.kept is None and stage != "transfer":
            self._keep_layers()
        parameters = self._trainable(stage)
        fused = self.device.type == "cuda" and self.processes.number == 1
        groups = _groups(parameters, added_parameters(self.student).values(), self._mechanism_factor(stage))
        factors = [group.pop("factor") for group in groups]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused or None)
        if optimizer_state is not None:
            load_optimizer(self.student, optimizer, optimizer_state)
        micro, recompute = self._micro_batch(stage)
        if recompute:
            set_checkpointing(self.student, True)
        self._compile(self._is_compiled(stage, recompute))
        self._train(stage, optimizer, factors, parameters, micro)
        self._compile(False)
        if recompute:
            set_checkpointing(self.student, False)
        self._evaluate(stage)
        self.stage, self.step = index + 1, 0
        self._save(None)

    def _train(
        self,
        stage: str,
        optimizer: torch.optim.Optimizer,
        factors: list[float],
        parameters: list[torch.nn.Parameter],
        micro: int,
    ) -> None:
        """Run the steps of a stage that are left; `factors` of the rate, one for each group of the optimizer."""
        settings, rows, windows = self.settings, self._shape(stage)[0], self._windows(stage)
        losses, saved, compiling = _Mean(self.processes), time.perf_counter(), self._compiles
        (done,) = self.processes.largest(self._progress(stage))
        while done < 1:
            rate = settings.rates[stage] * min(1.0, (self.step + 1) / 20) * (1 - done)
            for group, factor in zip(optimizer.param_groups, factors, strict=True):
                group["lr"] = factor * rate
            begun = time.perf_counter()
            tokens = windows.batch(self.step * rows, rows)
            if settings.repeat_share:
                seed = derive_seed(settings.seed, self.stage, self.step, 1)
                tokens = repeat_passages(tokens, settings.repeat_share, seed)
            losses.add(self._gradients_or_eagerly(stage, tokens, micro))
            self.processes.average_gradients(parameters)
            self.processes.clip_gradients(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens[stage] += tokens.numel()
            # A GPU is behind: taking the losses waits for it.
            taken = losses.take() if self.step % LOG_STEPS == 0 or self.step == 1 else None
            if not compiling:
                self.seconds[stage] += time.perf_counter() - begun
            elif self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            compiling = False
            if taken is not None:
                self._log(stage, taken)
            late = time.perf_counter() - saved > 60 * settings.save_minutes
            done, signal, due = self.processes.largest(self._progress(stage), self.signals.received, late)
            if signal or due:
                self._save(optimizer)
                saved = time.perf_counter()
            if signal:
                raise StoppedError(f"stopped by a signal: the same command resumes {self.out}", 128 + int(signal))

    def _windows(self, stage: str) -> Windows | MixedWindows:
        """Return the sequences of a stage."""
        (_, context), seed = self._shape(stage), derive_seed(self.settings.seed, STAGES.index(stage))
        own, sampled = (Windows(text, context, seed) for text in (self.text, self.sampled))
        if not own.count or not sampled.count:
            return own if own.count else sampled
        return MixedWindows((own, sampled), self.settings.sampled_share)

    def _sample(self) -> None:
        """Let the teacher write text, or read what it wrote before."""
        settings = self.settings
        if not settings.sampled_tokens:
            return
        self.sampled, self.sampled_seconds = sample_text(
            self.teacher._replace(model=self.whole.get("teacher") or self.teacher.model),
            self.text,
            self.out / DATA / "sampled",
            tokens=settings.sampled_tokens,
            context=settings.context,
            seed=derive_seed(settings.seed, len(STAGES)),
            device=self.device,
            memory_gb=settings.memory_gb,
            seconds=math.inf if settings.minutes is None else 30 * settings.minutes,
            notify=self.logger.info,
        )

    def _keep_layers(self) -> None:
        """Restore the softmax attention of the layers whose replacement raises the loss most."""
        tokens = self._windows("transfer").batch(0, self._micro_batch("transfer")[0]).to(self.device)
        with self._autocast():
            damages = replacement_damage(self.teacher.model, self.student, tokens)
        damage = self.processes.mean(damages).tolist()
        worst = sorted(range(len(damage)), key=lambda layer: -damage[layer])
        self._restore(tuple(sorted(worst[: self.settings.keep])))
        shown = ", ".join(f"{layer} ({damage[layer]:.3g})" for layer in worst)
        self.logger.info(f"damage of each layer's replacement, in nats: {shown}; layers {self.kept} keep softmax")

    def _restore(self, kept: tuple[int, ...]) -> None:
        """Build the student again, with softmax attention in these layers and its weights elsewhere."""
        source = self.teacher.model if self.processes.number == 1 else load_teacher(self.settings.model).model
        student = build_student(source, self.settings.mechanism, kept).to(self.device)
        student.load_state_dict(self.student.state_dict(), strict=False)
        self.student, self.kept = student, kept

    def _is_compiled(self, stage: str, recompute: bool) -> bool:
        """Whether --compile compiles the models in a stage; auto: if the stage is long enough for that."""
        settings, possible = self.settings, stage != "transfer" and not recompute and self.processes.number == 1
        if settings.compile != "auto":
            return possible and settings.compile == "on"
        pays = settings.steps[stage] >= COMPILED_STEPS if settings.minutes is None else self._share(stage) >= 1
        return possible and pays and self.device.type == "cuda"

    def _compile(self, compiled: bool) -> None:
        if compiled or self.compiled:
            compile_layers((self.teacher.model, self.student), compiled)
        self.compiled = compiled

    def _gradients_or_eagerly(self, stage: str, tokens: Tensor, micro: int) -> Tensor:
        """Compute gradients; if compiled models fail in the first step and --compile is auto, without compilation."""
        try:
            return self._gradients(stage, tokens, micro)
        except Exception as error:
            if (
                not self.compiled
                or self.settings.compile == "on"
                or self.step
                or isinstance(error, torch.OutOfMemoryError)
            ):
                raise
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            self.logger.info(f"torch.compile failed ({reason}): the stage runs without it")
        self._compile(False)
        self.student.zero_grad(set_to_none=True)
        return self._gradients(stage, tokens, micro)

    @property
    def _compiles(self) -> bool:
        """Whether the first step of a stage compiles kernels."""
        return self.device.type == "cuda"

    def _gradients(self, stage: str, tokens: Tensor, micro: int) -> Tensor:
        """Compute the gradients of this process's part of a step, a few sequences at a time; return its losses."""
        seed, total = derive_seed(self.settings.seed, self.stage, self.step), torch.zeros(1, device=self.device)
        inputs, targets = tokens, next_tokens(tokens)
        if self.encoder and stage != "transfer":
            mask = self.teacher.tokenizer.mask_token_id
            inputs, targets = mask_tokens(tokens, mask, self.settings.mask_rate, seed)
        known = int((targets != IGNORE_INDEX).sum()) / len(tokens)
        parts = zip(*(self.processes.part(x).split(micro) for x in (inputs, targets)), strict=True)
        for part, target in parts:
            share = len(part) * self.processes.number / len(tokens)
            with self._autocast():
                if stage == "transfer":
                    transfer = AttentionTransfer(self.teacher.model, self.student, self.settings.attention_rows)
                    generator = torch.Generator(self.device).manual_seed(seed)
                    found = transfer.backward(part.to(self.device), share, generator).mean()[None]
                else:
                    distillation = Distillation(
                        self.teacher.model, self.student, self.settings.next_token, self.compiled
                    )
                    given = part.to(self.device), target.to(self.device)
                    found = distillation.backward(*given, share, max(1e-9, known * len(part)))
            total = total + share * found
        return total

    def _trainable(self, stage: str) -> list[torch.nn.Parameter]:
        """Return what a stage trains; only that has gradients."""
        self.student.requires_grad_(False)
        if stage == "transfer":
            chosen = list(added_parameters(self.student).values())
        elif self.settings.train == "all":
            chosen = list(self.student.parameters())
        else:
            if not lora_layers(self.student):
                torch.manual_seed(self.settings.seed)
                add_adapters(self.student, self.settings.lora_rank)
            adapters = [x for name, x in self.student.named_parameters() if ".lora_" in name]
            chosen = [*adapters, *added_parameters(self.student).values()]
        for parameter in chosen:
            parameter.requires_grad_(True)
        if self.processes.number > 1 and stage != "transfer" and "student" not in self.whole:
            self._place("student", self.student)
            chosen = [x for x in self.student.parameters() if x.requires_grad]
        return chosen

    def _mechanism_factor(self, stage: str) -> float:
        """Return by which the rate of what the mechanisms add is higher than that of other weights."""
        own = self.settings.mechanism_lr
        return 1.0 if own is None or stage == "transfer" else own / self.settings.lr

    def _shape(self, stage: str) -> tuple[int, int]:
        """Return the number of sequences of a step, and their tokens."""
        settings = self.settings
        if stage != "long":
            return settings.batch_size, settings.context
        each = settings.batch_size * settings.context // (settings.long_context * self.processes.number)
        return max(1, each) * self.processes.number, settings.long_context

    def _share(self, stage: str) -> float:
        """Return the minutes of a stage, its share of --minutes without the time of sampling."""
        assert self.settings.minutes is not None
        return (
            (self.settings.minutes - self.sampled_seconds / 60)
            * self.settings.steps[stage]
            / sum(self.settings.steps.values())
        )

    def _progress(self, stage: str) -> float:
        """Return the fraction of a stage that is done."""
        if self.settings.minutes is not None:
            return self.seconds[stage] / (60 * self._share(stage))
        return self.step / self.settings.steps[stage]

    def _micro_batch(self, stage: str) -> tuple[int, bool]:
        """Return how many sequences fit into --memory-gb at a time, and whether activations must be recomputed."""
        rows, context = self._shape(stage)
        rows //= self.processes.number
        config = self.student.config.get_text_config()
        depth, width = config.num_hidden_layers, config.hidden_size
        inner = getattr(config, "intermediate_size", None) or 4 * width
        # Inputs of the linear layers and norms, q, k, v, and the scores and weights of windows of 64 or so, float32.
        layer = 4 * (12 * width + 4 * inner + 4 * 128 * config.num_attention_heads)
        budget = self.settings.memory_gb * 2**30 / context
        whole = layer if stage == "transfer" else depth * layer
        if budget >= whole:
            return _even(rows, int(budget / whole)), False
        again = layer + 4 * depth * width
        if budget >= again and stage != "transfer":
            return _even(rows, int(budget / again)), True
        raise ValueError(
            f"--memory-gb {self.settings.memory_gb:g} is too little for one sequence of {context:,} tokens: use "
            f"--memory-gb {math.ceil(10 * min(whole, again) * context / 2**30) / 10:g}, or shorter sequences"
        )

    def _autocast(self) -> Any:
        if self.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16)

    def _log(self, stage: str, losses: list[float]) -> None:
        done = sum(self.seconds.values())
        shares = {name: self.settings.steps[name] for name in STAGES}
        finished = sum(shares[name] for name in STAGES[: self.stage]) + shares[stage] * min(1.0, self._progress(stage))
        fraction = finished / sum(shares.values())
        record: Record = {"step": self._total_steps(), "stage": stage, "loss": sum(losses)}
        if stage == "transfer":
            record["transfer_loss"] = losses[0]
        else:
            record |= {"divergence": losses[0], "text_loss": losses[1], "loss": losses[0]}
        record |= {
            "tokens": sum(self.tokens.values()),
            "seconds": done,
            "tokens_per_second": self.tokens[stage] / self.seconds[stage] if self.seconds[stage] else 0.0,
            "memory": memory_used(self.device),
            "eta": done * (1 - fraction) / max(fraction, 1e-9),
        }
        self.logger.log_metrics(record)
        self.logger.progress(fraction, record)

    def _total_steps(self) -> int:
        """Return the number of steps of all stages so far."""
        return sum(self.tokens[name] // math.prod(self._shape(name)) for name in STAGES)

    def _evaluate(self, stage: str) -> None:
        found = self._perplexity(self.student)
        record: Record = {"step": self._total_steps(), "stage": stage, "eval_loss": math.log(found)}
        record |= {"eval_perplexity": found, "tokens": sum(self.tokens.values()), "seconds": sum(self.seconds.values())}
        self.logger.log_metrics(record)
        self.logger.info(f"{stage}: perplexity {found:.3f}, teacher {self.teacher_perplexity:.3f}")

    def _perplexity(self, model: Any) -> float:
        tokens = torch.from_numpy(self.held_out[: self.settings.eval_tokens])
        mask = (self.teacher.tokenizer.mask_token_id, self.settings.mask_rate) if self.encoder else None
        with self._autocast():
            return perplexity(model, tokens, self.settings.context, mask=mask)

    def _described(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(dataclasses.asdict(self.settings), default=str)))

    def _check_settings(self) -> None:
        path = self.out / RUN
        if not path.exists():
            return
        before = read_json(path)["settings"]
        own = self._described()
        # Options that are newer than the run have their defaults.
        newer = {x.name: x.default for x in dataclasses.fields(self.settings) if x.name in own.keys() - before.keys()}
        changed = {k: v for k, v in differences(before | newer, own).items() if k.split(".")[0] not in FREE}
        if changed:
            shown = ", ".join(f"{name} {old!r} → {new!r}" for name, (old, new) in list(changed.items())[:4])
            raise ValueError(
                f"{self.out} is a run with other settings ({shown}): use the same settings to resume it, or another "
                "--out"
            )

    def _write_metadata(self) -> None:
        metadata = {
            "settings": self._described(),
            "data": {name: self.store.metadata.get(name) for name in ("sha256", "tokens", "bytes")},
            "parameters": sum(x.numel() for x in self.student.parameters()),
            "device": str(self.device),
            "processes": self.processes.number,
            "precision": "bf16" if self.device.type == "cuda" else "fp32",
        }
        write_atomically(self.out / RUN, json.dumps(metadata, indent=1) + "\n")

    def _save(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Write what the run is resumed from; if this fails, or the process is killed, the last one remains."""
        training = {"stage": self.stage, "step": self.step, "seconds": self.seconds, "tokens": self.tokens}
        training["total_steps"], training["kept"] = self._total_steps(), self.kept
        training["optimizer"] = None if optimizer is None else gather_optimizer(self.student, optimizer)
        tensors = whole_tensors(self.student)
        if not self.processes.main:
            return
        with replace_folder(self.out / RESUME, (STUDENT, TRAINING, "SHA256SUMS"), mark=TRAINING) as partial:
            save_file(tensors, partial / STUDENT)
            torch.save(training, partial / TRAINING)
            write_checksums(partial)

    def _load(self) -> Any:
        """Load the last checkpoint, if there is one; return the state of the optimizer."""
        folder = self.out / RESUME
        if not folder.exists():
            return None
        verify_checksums(folder, (STUDENT, TRAINING), f"remove {folder}, and the run starts again")
        training = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
        tensors = load_file(folder / STUDENT)
        if training.get("kept") is not None:
            self._restore(tuple(training["kept"]))
        if any(".lora_" in name for name in tensors):
            add_adapters(self.student, self.settings.lora_rank)
        self.student.load_state_dict(tensors, strict=False)
        self.stage, self.step = training["stage"], training["step"]
        self.seconds, self.tokens = training["seconds"], training["tokens"]
        if self.processes.main:
            truncate_records(self.out, training["total_steps"])
        where = "the end" if self.stage == len(STAGES) else f"step {self.step} of {STAGES[self.stage]}"
        self.logger.info(f"resumed at {where}")
        return training["optimizer"]

    def _finish(self) -> None:
        """Write the model and the report, then remove what the run was resumed from."""
        tensors = whole_tensors(self.student) if "student" in self.whole else {}
        if not self.processes.main:
            return
        if self.processes.number > 1:
            self.teacher = self.teacher._replace(model=self.whole["teacher"].to(self.device))
        if tensors:
            self.student = self.whole["student"].to(self.device)
            self.student.load_state_dict(tensors, strict=False)
        self.student.eval().requires_grad_(False)
        if self.settings.adapters == "separate" and self.settings.distill_steps + self.settings.long_steps:
            with replace_folder(self.out / "adapter", (ADAPTER, ADAPTER_CONFIG), what="an adapter") as partial:
                save_adapters(self.student, self.settings.lora_rank, partial, self.out / LAST)
            merged, native = False, False
        else:
            merged, native = True, why_not_native(self.student) is None and not self.encoder
        results = self._measure()
        remove_lora(self.student, merge=merged)
        model = self.student.cpu()
        model.config.use_cache = True
        if not self.encoder:
            model.generation_config = self.teacher.model.generation_config
        with replace_folder(self.out / LAST, ("*",), what="a model") as partial:
            if native:
                converted = to_language_model(model)
                write_model(converted, partial)
            else:
                model.save_pretrained(partial)
            self.teacher.tokenizer.save_pretrained(partial)
        if not native and not self.encoder and merged:
            self.logger.info(f"the model is a transformers folder: {why_not_native(model)}")
        from longspan.train.linearize.report import write_linearize_report  # matplotlib, which nothing before needs

        write_linearize_report(self.out, results, self.out / REPORT)
        shutil.rmtree(self.out / RESUME, ignore_errors=True)
        self.logger.info(f"model: {self.out / LAST}; report: {self.out / REPORT}")

    def _measure(self) -> dict[str, Any]:
        results = evaluate(
            {"teacher": self.teacher.model, "student": self.student},
            self.teacher.tokenizer,
            torch.from_numpy(self.held_out),
            self.settings,
            encoder=self.encoder,
            autocast=self._autocast,
            notify=self.logger.info,
        )
        if self.kept is not None:
            results["kept_layers"] = list(self.kept)
        sampled = {"stage": "sample", "tokens": len(self.sampled), "seconds": self.sampled_seconds}
        results["stages"] = [sampled] if len(self.sampled) else []
        results["stages"] += [
            {"stage": name, "tokens": self.tokens[name], "seconds": self.seconds[name]}
            for name in STAGES
            if self.settings.steps[name]
        ]
        write_atomically(self.out / "results.json", json.dumps(results, indent=1) + "\n")
        return results


def _groups(
    parameters: list[torch.nn.Parameter], added: Iterable[torch.nn.Parameter], factor: float
) -> list[dict[str, Any]]:
    """Return groups of an optimizer: what mechanisms add has a rate `factor` times as high.

    Sharded parameters and others are apart, because an optimizer does not update both kinds at once.
    """
    new = {id(x) for x in added} if factor != 1 else set()
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for x in parameters:
        groups.setdefault((id(x) in new, is_sharded(x)), []).append(x)
    return [{"params": groups[kind], "factor": factor if kind[0] else 1.0} for kind in sorted(groups)]


def _even(rows: int, most: int) -> int:
    """Return the size of the fewest parts of at most `most` rows, about equal."""
    return -(-rows // -(-rows // most))


class _Mean:
    """The mean of the losses since it was last taken, over all processes."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.total: Tensor | None = None
        self.count = 0

    def add(self, losses: Tensor) -> None:
        self.total, self.count = losses if self.total is None else self.total + losses, self.count + 1

    def take(self) -> list[float]:
        assert self.total is not None
        found: list[float] = self.processes.mean(self.total / self.count).tolist()
        self.total, self.count = None, 0
        return found
