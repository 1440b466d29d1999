"""longspan's models as transformers models: one wrapper for every mechanism."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

from longspan.hf.cache import StateCache
from longspan.hf.config import LongspanConfig
from longspan.layout import Packing
from longspan.models.checkpoint import CONFIG, describe, digests
from longspan.models.residual import Stack
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel


class LongspanPreTrainedModel(PreTrainedModel):
    """What they share: `model` is longspan's own, and the files are those of `longspan.save`."""

    config_class = LongspanConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ("ResidualBranch",)
    _is_stateful = True  # a state cannot be rolled back
    model: LanguageModel | EncoderDecoder | Classifier

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.model = self._build(config)
        names = self.model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, tensor in names.items():
            first.setdefault(id(tensor), name)
        ties = {f"model.{name}": f"model.{first[id(x)]}" for name, x in names.items() if first[id(x)] != name}
        self._tied_weights_keys = ties
        config.tie_word_embeddings = bool(ties)
        if next(self.model.parameters()).device.type != "meta":
            for module in self.model.modules():
                setattr(module, "_is_hf_initialized", True)  # noqa: B010  longspan's initialization stays
        self.post_init()

    def _build(self, config: LongspanConfig) -> LanguageModel | EncoderDecoder | Classifier:
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        """For what a checkpoint did not hold: a new head. Anything else cannot be made up."""
        missing = [
            name for name, x in module.named_parameters(recurse=False) if not getattr(x, "_is_hf_initialized", False)
        ]
        if not missing:
            return
        if not isinstance(module, nn.Linear):
            raise ValueError(f"the checkpoint lacks {', '.join(missing)} of a {type(module).__name__}")
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """As in transformers; `longspan.load` reads the folder too."""
        tensors = options.pop("state_dict", None) or self.state_dict()
        own = {name.removeprefix("model."): x for name, x in tensors.items() if name not in self._tied_weights_keys}
        adapters = getattr(self, "_hf_peft_config_loaded", False)
        options.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, state_dict=tensors if adapters else own, **options)
        if not adapters and options.get("is_main_process", True):
            path = Path(save_directory) / CONFIG
            held = json.loads(path.read_text(encoding="utf-8"))
            held |= describe(self.model) | {"sha256": digests(path.parent)}
            path.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")

    def get_input_embeddings(self) -> nn.Module:
        return _language_model(self.model).embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise ValueError("the vocabulary is part of ModelConfig: build a model with another vocab_size")

    def get_output_embeddings(self) -> nn.Module | None:
        return None

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers must be 1, got {every_n_layers}: longspan recomputes all layers or none")
        self.gradient_checkpointing = enable
        for module in self.modules():
            if isinstance(module, Stack) and module.execution in ("keep", "recompute"):
                module.execution = "recompute" if enable else self._execution()

    def _execution(self) -> str:
        return self.config.model.execution

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *rest: Any) -> None:
        """Refuses what the positions cannot reach before the first token. The state is made by the first forward."""
        positions = _language_model(self.model).positions
        if positions is not None and generation_config.max_length is not None:
            positions.check(generation_config.max_length)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _remember(
        self, model: LanguageModel, input_ids: Tensor, mask: Tensor | None, cache: StateCache | None, **context: Any
    ) -> tuple[Tensor, StateCache]:
        """Hidden vectors of new tokens, and the cache after them."""
        B, T = input_ids.shape
        if cache is None:
            cache = StateCache(model.config, model.new_state(B, **context))
        elif not isinstance(cache, StateCache):
            raise ValueError(f"past_key_values must be what this model returned, got a {type(cache).__name__}")
        cache.check(model.config, B)
        new = None if mask is None or (T == 1 and cache.slots) else mask[:, -T:].bool()
        hidden, cache.state = model.extend_hidden(input_ids, cache.state, key_mask=new)
        cache.slots += T
        return hidden, cache

    def _hidden(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past: StateCache | None,
        use_cache: bool | None,
        **given: Any,
    ) -> tuple[Tensor, StateCache | None]:
        """Hidden vectors (B, T, dim), with a memory if it is asked for or one was given."""
        if input_ids is None:
            raise ValueError("input_ids is needed; inputs_embeds cannot be used with longspan models")
        model = _language_model(self.model)
        how = _packed(input_ids, attention_mask, given)
        if past is not None or (use_cache and model.config.causal):
            if how:
                raise ValueError("packed sequences are for training, not for generation: pad them, with attention_mask")
            return self._remember(model, input_ids, attention_mask, past)
        mask = None if attention_mask is None else attention_mask.bool()
        if not how:
            _check_positions(given.get("position_ids"), mask)
        return model.hidden(input_ids, key_mask=mask, packing=how.get("packing")), None


class LongspanModel(LongspanPreTrainedModel):
    """The last layer's vectors."""

    model: LanguageModel
    _keys_to_ignore_on_load_unexpected = (r"to_logits\.", r"from_dim\.")

    def _build(self, config: LongspanConfig) -> LanguageModel:
        model = LanguageModel(config.model)
        model.to_logits = model.from_dim = None
        return model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **given: Any,
    ) -> Any:
        hidden, cache = self._hidden(input_ids, attention_mask, past_key_values, use_cache, **given)
        out = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
        return out if return_dict is not False else out.to_tuple()


class LongspanForCausalLM(LongspanPreTrainedModel, GenerationMixin):
    """A causal language model; transformers' `generate` runs it in constant memory."""

    model: LanguageModel

    def _build(self, config: LongspanConfig) -> LanguageModel:
        if not config.model.causal:
            raise ValueError("a causal language model needs ModelConfig(causal=True)")
        return LanguageModel(config.model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> Any:
        """labels: (B, T), −100 where there is nothing to learn; shifted inside. logits_to_keep: how many at the end."""
        hidden, cache = self._hidden(input_ids, attention_mask, past_key_values, use_cache, **given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return out if return_dict is not False else out.to_tuple()


class LongspanForMaskedLM(LongspanPreTrainedModel):
    """A bidirectional language model that fills in hidden tokens."""

    model: LanguageModel

    def _build(self, config: LongspanConfig) -> LanguageModel:
        if config.model.causal:
            raise ValueError("a masked language model sees both sides: it needs ModelConfig(causal=False)")
        return LanguageModel(config.model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> Any:
        """labels: (B, T), −100 where there is nothing to learn."""
        hidden, _ = self._hidden(input_ids, attention_mask, None, False, **given)
        logits = self.model.logits(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        out = MaskedLMOutput(loss=loss, logits=logits)
        return out if return_dict is not False else out.to_tuple()


class LongspanForSequenceClassification(LongspanPreTrainedModel):
    """One answer for a sequence, from the mean over its real tokens. A language model's weights fit its body."""

    model: Classifier
    _keys_to_ignore_on_load_unexpected = (r"to_logits\.", r"from_dim\.")

    def _build(self, config: LongspanConfig) -> Classifier:
        return Classifier(replace(config.model, num_classes=config.num_labels))

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        config.arguments = {"config": self.model.config.to_dict()}

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        body = r"^(?:model\.)?(?=(?:embedding|positions|to_dim|transformer)\.)"
        options.setdefault("key_mapping", {body: "model.body."})
        return super().from_pretrained(*arguments, **options)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **given: Any,
    ) -> Any:
        _unknown(given)
        if input_ids is None:
            raise ValueError("input_ids is needed; inputs_embeds cannot be used with longspan models")
        logits = self.model(input_ids, key_mask=None if attention_mask is None else attention_mask.bool())
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        out = SequenceClassifierOutput(loss=loss, logits=logits)
        return out if return_dict is not False else out.to_tuple()


class LongspanForSeq2SeqLM(LongspanPreTrainedModel, GenerationMixin):
    """An encoder that reads both ways, and a decoder that writes with attention to it."""

    model: EncoderDecoder

    def _build(self, config: LongspanConfig) -> EncoderDecoder:
        if not config.is_encoder_decoder:
            raise ValueError("a sequence-to-sequence model needs LongspanConfig(decoder, encoder=…)")
        both = {name: config.arguments[name] for name in ("pad_token", "tie_embeddings")}
        return EncoderDecoder(config.encoder, config.model, **both)

    def get_encoder(self, *_: Any) -> _Encoder:
        return _Encoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels one place later, after the token that starts."""
        start = self.generation_config.decoder_start_token_id
        first = labels.new_full((len(labels), 1), self.model.pad_token if start is None else start)
        given = torch.cat([first, labels[:, :-1]], 1)
        return given.masked_fill(given == -100, self.model.pad_token)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> Any:
        """labels: (B, T), −100 where there is nothing to learn; without decoder_input_ids they are made from it."""
        _unknown(given)
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("input_ids is needed, or encoder_outputs")
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("decoder_input_ids is needed, or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        context = {
            "context": encoder_outputs[0],
            "context_mask": None if attention_mask is None else attention_mask.bool(),
        }
        decoder, cache = self.model.decoder, None
        if past_key_values is not None or use_cache:
            hidden, cache = self._remember(
                decoder, decoder_input_ids, decoder_attention_mask, past_key_values, **context
            )
        else:
            mask = None if decoder_attention_mask is None else decoder_attention_mask.bool()
            hidden = decoder.hidden(decoder_input_ids, key_mask=mask, **context)
        logits = decoder.logits(hidden)
        loss = None
        if labels is not None:
            # Already in step: label t is what follows decoder_input_ids up to t.
            total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            loss = total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        out = Seq2SeqLMOutput(
            loss=loss, logits=logits, past_key_values=cache, encoder_last_hidden_state=encoder_outputs[0]
        )
        return out if return_dict is not False else out.to_tuple()


class _Encoder:
    """The encoder as `generate` calls it: once, before the first token."""

    main_input_name = "input_ids"

    def __init__(self, model: EncoderDecoder) -> None:
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return BaseModelOutput(last_hidden_state=self.model.encode(input_ids, mask.bool())[0])

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True, **given: Any
    ) -> BaseModelOutput:
        _unknown(given)
        return self.forward(input_ids, attention_mask)


def _language_model(model: LanguageModel | EncoderDecoder | Classifier) -> LanguageModel:
    if isinstance(model, LanguageModel):
        return model
    body = model.decoder if isinstance(model, EncoderDecoder) else model.body
    assert isinstance(body, LanguageModel)
    return body


def _packed(input_ids: Tensor, attention_mask: Tensor | None, given: Mapping[str, Any]) -> dict[str, Packing]:
    """The packing that transformers' flattening collator describes, by lengths or by positions that start again."""
    positions, offsets = given.get("position_ids"), given.get("cu_seq_lens_q")
    _unknown({name: value for name, value in given.items() if name not in _PACKING})
    if offsets is not None:
        return {"packing": Packing(offsets.int(), int(given["max_length_q"]))}
    if positions is None or attention_mask is not None or len(input_ids) != 1:
        return {}
    starts = (positions[0] == 0).nonzero()[:, 0]
    if len(starts) < 2:
        return {}
    ends = starts.new_tensor([positions.shape[1]])
    offsets = torch.cat([starts, ends]).int()
    return {"packing": Packing(offsets, int((offsets[1:] - offsets[:-1]).max()))}


def _check_positions(positions: Tensor | None, mask: Tensor | None) -> None:
    """Positions follow from the mask; others cannot be had, and are not passed over."""
    if positions is None:
        return
    kept = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    if bool(((positions != kept.long().cumsum(1) - 1) & kept).any()):
        raise ValueError("position_ids must count the real tokens of each row from 0, or start again in one packed row")


_PACKING = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def _unknown(given: Mapping[str, Any]) -> None:
    """Refuses arguments that would change nothing; those that are None or off are let through."""
    found = sorted(name for name, value in given.items() if value is not None and value is not False)
    if found:
        raise ValueError(f"longspan models do not take {', '.join(found)}")
