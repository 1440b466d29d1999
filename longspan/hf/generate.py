"""transformers' `generate` on longspan's decode loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from longspan.generation.decode import DecodeLoop
from longspan.generation.generate import read_prompt
from longspan.generation.sampling import Sampler
from longspan.models.transformer import EncoderDecoder, LanguageModel

# Keyword arguments of a forward pass that the decode loop implements or does not need.
_SUPPORTED = {"attention_mask", "decoder_attention_mask", "encoder_outputs", "use_cache", "logits_to_keep"}


class LongspanGenerationMixin(GenerationMixin):
    """Runs greedy search and sampling of `generate` on `DecodeLoop`, with the same tokens as transformers' own loop.

    `generate` prepares everything as usual: processors, stopping criteria, masks, streamers. Only the loop over tokens
    is replaced. transformers' own loop runs if the scores, logits or a cache are returned or a cache is given, with
    use_cache=False, in training mode, for right-padded prompts and under FSDP or DeepSpeed ZeRO-3; beam search and
    assisted generation never come here.
    """

    model: LanguageModel | EncoderDecoder

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Implement greedy search and sampling; `GenerationMixin.generate` calls this."""
        mask = model_kwargs.get("decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask")
        given = {name for name, value in model_kwargs.items() if value is not None}
        if (
            self.training
            or synced_gpus
            or generation_config.return_dict_in_generate
            or generation_config.is_assistant
            or generation_config.prefill_chunk_size is not None
            or not model_kwargs.get("use_cache")
            or not given <= _SUPPORTED
            or not (mask is None or bool(mask[:, -1].all()))
        ):
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        sampler = _ProcessorSampler(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        loop = self._decode_loop(input_ids, mask, sampler, generation_config.max_length, model_kwargs)
        with loop.single_thread():
            while not sampler.finished:
                loop.step()
        if streamer is not None:
            streamer.end()
        return sampler.tokens

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *rest: Any) -> None:
        """Refuse more tokens than there are positions. The state is created when the prompt is read."""
        decoder = self.model.decoder if isinstance(self.model, EncoderDecoder) else self.model
        if decoder.positions is not None and generation_config.max_length is not None:
            decoder.positions.check(generation_config.max_length)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _decode_loop(
        self, input_ids: Tensor, mask: Tensor | None, sampler: Sampler, max_length: int, model_kwargs: dict[str, Any]
    ) -> DecodeLoop:
        """Return a loop that has read the prompt."""
        decoder, context = self.model, {}
        if isinstance(decoder, EncoderDecoder):
            source_mask = model_kwargs.get("attention_mask")
            context["context"] = model_kwargs["encoder_outputs"][0]
            context["context_mask"] = None if source_mask is None else source_mask.bool()
            decoder = decoder.decoder
        device = next(decoder.parameters()).device
        tokens = input_ids.to(device)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.to(device).bool()
        state = decoder.new_state(len(tokens), max_length=max_length, **context)
        logits, state = read_prompt(decoder, state, tokens, real)
        return DecodeLoop(decoder, state, logits, sampler)


class _ProcessorSampler(Sampler):
    """transformers' logits processors, draws, padding, stopping criteria and streamer as a sampler.

    Attributes:
        tokens: (B, t) int64, the prompts and what was generated so far.
        finished: Whether every sequence has ended.
    """

    def __init__(self, input_ids: Tensor, processors: Any, stopping: Any, config: Any, streamer: Any) -> None:
        super().__init__(input_ids[:, :0])
        self.tokens, self.finished = input_ids, False
        self._processors, self._stopping, self._streamer = processors, stopping, streamer
        self._draws = bool(config.do_sample)
        self._unfinished = torch.ones(len(input_ids), dtype=torch.int64, device=input_ids.device)
        self._pad = None
        if any(hasattr(criterion, "eos_token_id") for criterion in stopping):
            self._pad = config._pad_token_tensor.to(input_ids.device)

    def choose(self, logits: Tensor) -> Tensor:
        scores = logits.to(self.tokens.device, torch.float32, copy=True)  # processors may write to it
        scores = self._processors(self.tokens, scores)
        if self._draws:
            token = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            token = scores.argmax(-1)
        if self._pad is not None:
            token = token * self._unfinished + self._pad * (1 - self._unfinished)
        self.tokens = torch.cat([self.tokens, token[:, None]], 1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self._unfinished = self._unfinished & ~self._stopping(self.tokens, None)
        self.finished = not bool(self._unfinished.any())
        return token
