"""The loop: steps, scores, checkpoints, and an end that loses nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
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
from longspan.train.data.batches import Batch, mixed
from longspan.train.evaluation import evaluate
from longspan.train.fsdp import is_sharded, load_optimizer, optimizer_values, whole_model
from longspan.train.loggers import Record, Watch, mean, memory, truncate_records
from longspan.train.objectives import masked
from longspan.train.presets import Values
from longspan.train.run_checkpoint import (
    check_writable,
    checkpoint_bytes,
    memory_from,
    memory_values,
    random_states,
    restore_random,
    save_run,
)
from longspan.train.setup import RUN, Prepared, learning_rate
from longspan.train.signals import Clock, Signals, StoppedError, out_of_memory

WARM_UP = 3  # steps in which a compiled model is compiled, tried and captured
_USUAL, _LATE = 50, 10  # losses that are compared: a single odd batch is no divergence
BAD_BATCH = "bad-batch.pt"


class Loop:
    """A run, step by step. step: how many are done. tokens: how many were read for them."""

    def __init__(self, prepared: Prepared, watch: Watch) -> None:
        self.p, self.watch = prepared, watch
        self.device = prepared.accelerator.device
        self.step, self.tokens, self.clock = 0, 0, Clock()
        self.window: list[float] = []  # losses since the last record
        self.recent: deque[float] = deque(maxlen=_USUAL + _LATE)
        self.carried: list[StackState | None] = [None] * prepared.train.accumulate
        self.pending: tuple[int, Tensor] | None = None
        self.batches: deque[tuple[int, list[Batch]]] = deque(maxlen=_LATE + 1)
        self.signals = Signals()
        self.done, self.lr = 0.0, 0.0
        self.mark = (0.0, 0)  # seconds and tokens at the last record
        self.score: Record = {}
        self.text = TextCodec(prepared.tokenizer)
        self.sharded = is_sharded(prepared.accelerator)

    def run(self) -> Record:
        """Trains to the end and returns the last score; StoppedError says why it did not."""
        p = self.p
        check_writable(p.run, 2 * checkpoint_bytes(p.model))
        self._begin()
        try:
            with self.signals.noticed():
                self._train()
            self._record()
            self._evaluate()
            self._save()
        except torch.OutOfMemoryError as error:
            raise StoppedError(out_of_memory(error, p.train), 4) from error
        finally:
            self.watch.close()
        return self.score

    def _train(self) -> None:
        warming = WARM_UP if self.p.about["compiled"] else 0
        while self._wanted():
            if warming:
                with self.clock.paused():
                    self.advance()
                    self.settle()
                warming, self.mark = warming - 1, (self.clock.seconds, self.tokens)
            else:
                self.advance()
            self._routine()
        self.settle()

    def _begin(self) -> None:
        p = self.p
        p.objective.train()
        if p.saved is None:
            torch.manual_seed(mixed(p.train.seed, p.shape.process))  # Dropout differs between processes.
        else:
            self._restore(p.saved)
        if p.accelerator.is_main_process:
            truncate_records(p.run, self.step if p.saved is not None else -1)
            beside = p.run / f".{RUN}"
            beside.write_text(json.dumps(p.about, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, p.run / RUN)
        p.accelerator.wait_for_everyone()

    def _wanted(self) -> bool:
        """Whether another step is to be made; every process comes to the same answer."""
        received = self.signals.received
        signalled, seconds = self._agree(float(received), self.clock.seconds / self.p.shape.processes)
        self.done = self._done(seconds)
        if signalled:
            self.settle()
            self._save()
            name = signal.Signals(received or signal.SIGTERM).name
            raise StoppedError(f"{name}: saved at step {self.step}; run the same command to go on", 128 + received)
        return self.done < 1

    def _done(self, seconds: float) -> float:
        train = self.p.train
        parts = [0.0]
        if train.steps is not None:
            parts.append(self.step / train.steps)
        if train.minutes is not None:
            parts.append(seconds / (60 * train.minutes))
        return max(parts)

    def advance(self) -> None:
        """One step: gradients of every micro-batch, weighted by their targets, clipped, applied."""
        p, train = self.p, self.p.train
        if p.redraws.before(self.step, train.accumulate):
            self.carried = [None] * train.accumulate
        batches = self._draw()
        self.batches.append((self.step, batches))
        (count,) = self._agree(float(sum(batch.count for batch in batches)))
        count = max(count, 1.0)
        total = torch.zeros((), device=self.device)
        for micro, batch in enumerate(batches):
            last = micro == len(batches) - 1
            with contextlib.nullcontext() if last else p.accelerator.no_sync(p.wrapped):
                loss = self._loss(micro, batch.to(self.device))
                # Processes' gradients are averaged, and have different numbers of targets.
                p.accelerator.backward(loss * (batch.count * p.shape.processes / count))
            total += loss.detach() * batch.count
        if train.clip:
            p.accelerator.clip_grad_norm_(p.objective.parameters(), train.clip)
        self.lr = learning_rate(train, self.step, self.done)
        for group in p.optimizer.param_groups:
            group["lr"] = self.lr
        p.optimizer.step()
        p.optimizer.zero_grad(set_to_none=True)
        if p.shape.processes > 1:
            total = p.accelerator.reduce(total)
        self.step += 1
        self.tokens += p.shape.rows * train.context
        before, self.pending = self.pending, (self.step, total / count)
        if before is not None:
            self._observe(*before)
        if self.device.type != "cuda":  # There, reading the loss at once would keep the device waiting.
            self.settle()

    def _draw(self) -> list[Batch]:
        p, train = self.p, self.p.train
        batches = p.batches.step()
        if train.objective != "masked":
            return batches
        found = []
        for micro, batch in enumerate(batches):
            own = p.shape.own(micro)
            seeds = [mixed(train.seed, self.step, row) for row in range(own.start, own.stop)]
            found.append(masked(batch, train.mask_rate, p.store.vocab_size, seeds))
        return found

    def _loss(self, micro: int, batch: Batch) -> Tensor:
        p = self.p
        if not p.train.carry_state:
            return p.wrapped(batch.tokens, batch.targets, batch.offsets, batch.key_mask)
        assert batch.fresh is not None
        state = self.carried[micro]
        if state is None:
            state = self._empty(len(batch.fresh))
        elif batch.fresh.any():
            rows = batch.fresh.nonzero()[:, 0]
            state = state.put(rows, self._empty(len(rows)))
        loss, after = p.wrapped(batch.tokens, batch.targets, None, batch.key_mask, state)
        self.carried[micro] = after.detach()
        return loss

    def _empty(self, rows: int) -> StackState:
        assert isinstance(self.p.model, LanguageModel)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return self.p.model.new_state(rows, device=self.device, dtype=half.get(self.p.accelerator.mixed_precision))

    def _agree(self, *values: float) -> list[float]:
        """Each value's sum over the processes."""
        if self.p.shape.processes == 1:
            return list(values)
        # Not float32: counts of tokens are exact up to 2^53 only in this.
        return self.p.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def settle(self) -> None:
        """Reads the loss that is still on the device."""
        if self.pending is not None:
            before, self.pending = self.pending, None
            self._observe(*before)

    def _observe(self, step: int, loss: Tensor) -> None:
        value = float(loss)
        if not math.isfinite(value):
            raise StoppedError(self._keep_batch(step, f"the loss of step {step} is {value}"), 3)
        self.window.append(value)
        self.recent.append(value)
        limit, late = self._limit(), list(self.recent)[-_LATE:]
        if mean(late) > limit:
            # The batch to look at is where it began.
            first = step - _LATE + 1 + next(i for i, x in enumerate(late) if x > limit)
            said = f"from step {first} on the loss has been {mean(late):.4g}, over {limit:.4g}"
            raise StoppedError(self._keep_batch(first, said), 3)
        self.watch.progress(self.done, self._figures(value))

    def _limit(self) -> float:
        """What the mean of the last losses may not exceed, from those before them."""
        usual, times = list(self.recent)[:-_LATE], self.p.train.divergence
        return times * mean(usual) if times and len(usual) == _USUAL else math.inf

    def _keep_batch(self, step: int, said: str) -> str:
        """Saves the batch of a step that went wrong; what was said of it, and where it is."""
        batches = next((found for number, found in self.batches if number == step - 1), [])
        one = self.p.shape.processes == 1
        path = self.p.run / (BAD_BATCH if one else f"bad-batch-{self.p.shape.process}.pt")
        torch.save({"step": step, "batches": [vars(batch) for batch in batches]}, path)
        return f"{said}: its batch is in {path}, the last checkpoint is kept; lower --lr, or lengthen --warmup"

    def _routine(self) -> None:
        train = self.p.train
        if self.step % train.log_every == 0 or self.step == 1:
            self.settle()
            self._record()
        if self.step % train.eval_every == 0 and self.done < 1:
            self.settle()
            self._evaluate()
        if self.step % train.save_every == 0:
            self.settle()
            if self.recent[-1] <= self._limit():  # Not in what may be the beginning of the end.
                self._save()

    def _figures(self, loss: float) -> Record:
        seconds, tokens = self.clock.seconds, self.tokens
        speed = (tokens - self.mark[1]) / max(seconds - self.mark[0], 1e-9)
        per_byte = self.p.store.bytes_per_token
        causal = self.p.train.objective == "causal"
        return {
            "step": self.step,
            "steps": self.p.train.steps,
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / per_byte if causal and per_byte else None,
            "lr": self.lr,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": speed,
            "memory": memory(self.device),
            "eta": seconds * (1 - self.done) / self.done if self.done else None,
        }

    def _record(self) -> None:
        if not self.window:
            return
        record = self._figures(mean(self.window))
        self.window, self.mark = [], (record["seconds"], record["tokens"])
        self.watch.record(record)

    def _evaluate(self) -> None:
        """Scores the held-out data and draws a sample, unless that is done for this step."""
        p = self.p
        if self.score.get("step") == self.step:
            return
        at = {"step": self.step, "steps": p.train.steps, "tokens": self.tokens, "seconds": self.clock.seconds}
        with self.clock.paused():
            found = evaluate(p.objective, p.store, p.store.held_out, p.shape, p.train, p.accelerator)
            self.score = at | found
            if found:
                self.watch.record(self.score)
            whole = p.accelerator.is_main_process and not self.sharded
            if whole and p.train.sample_tokens and p.train.objective == "causal":
                self.watch.sample({"step": self.step, **self._sample()})

    def _sample(self) -> Record:
        p = self.p
        assert isinstance(p.model, LanguageModel)
        prompt = self.text.encode(p.train.prompt.encode())
        if not prompt:
            part = p.store.held_out if len(p.store.held_out) else p.store.train
            start = int(part.start[0])
            prompt = p.store.tokens[start : start + min(64, int(part.length[0]))].tolist()
        sampling = Sampling(temperature=0.8, top_p=0.95)
        said = generate(p.model, prompt, p.train.sample_tokens, sampling=sampling, seed=p.train.seed).tokens[0]
        return {"prompt": self.text.decode(prompt), "text": self.text.decode(said)}

    def _save(self) -> None:
        p = self.p
        model = whole_model(p.objective) if self.sharded else p.model
        optimizer = p.optimizer.optimizer
        states = gather_object([random_states(self.device)])
        carried = gather_object([[None if state is None else memory_values(state) for state in self.carried]])
        training: Values = {
            "about": p.about,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.clock.seconds,
            "window": self.window,
            "recent": list(self.recent),
            "mark": list(self.mark),
            "position": p.batches.position,
            "optimizer": optimizer_values(p.objective, optimizer) if self.sharded else optimizer.state_dict(),
            "sharded": self.sharded,
            "scaler": None if p.accelerator.scaler is None else p.accelerator.scaler.state_dict(),
            "random": states,
            "carried": carried,
            "score": self.score,
        }
        with self.clock.paused():
            if p.accelerator.is_main_process:
                save_run(p.run, model, training, p.tokenizer)
            p.accelerator.wait_for_everyone()

    def _restore(self, saved: Values) -> None:
        p = self.p
        self.step, self.tokens = saved["step"], saved["tokens"]
        self.window, self.mark = list(saved["window"]), tuple(saved["mark"])
        self.recent.extend(saved["recent"])
        self.score = saved["score"]
        self.clock = Clock(saved["seconds"])
        p.batches.position = saved["position"]
        if saved["sharded"] != self.sharded:
            raise ValueError("the run was saved with FSDP or without it, and this command has it the other way round")
        if self.sharded:
            load_optimizer(p.objective, p.optimizer.optimizer, saved["optimizer"])
        else:
            p.optimizer.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"] is not None and p.accelerator.scaler is not None:
            p.accelerator.scaler.load_state_dict(saved["scaler"])
        if len(saved["random"]) == p.shape.processes:
            restore_random(saved["random"][p.shape.process], self.device)
        else:
            torch.manual_seed(mixed(p.train.seed, p.shape.process, self.step))
        if p.train.carry_state:
            if len(saved["carried"]) != p.shape.processes:
                raise ValueError(
                    f"the run carries the state of {len(saved['carried'])} processes, this command has "
                    f"{p.shape.processes}: resume it with as many"
                )
            own = saved["carried"][p.shape.process]
            self.carried = [None if v is None else memory_from(v, self._empty(p.shape.batch_size)) for v in own]
        self.watch.note(f"going on from step {self.step}")
