"""longspan's models as transformers models: one wrapper for every mechanism."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple, is_peft_available

from longspan.hf.cache import StateCache
from longspan.hf.config import LongspanConfig, SavedAsStub, checkpoint_of
from longspan.hf.context_parallel import LongspanContextParallel
from longspan.hf.generate import LongspanGenerationMixin
from longspan.layout import Packing, PaddedSpan
from longspan.models.adapter import ADAPTER_CONFIG
from longspan.models.checkpoint import CONFIG, describe, digests
from longspan.models.hub import LONGSPAN_MAP, write_stub
from longspan.models.residual import ResidualBranch, Stack
from longspan.models.sharded import is_sharded
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel
from longspan.utils import write_atomically


class LongspanPreTrainedModel(SavedAsStub, PreTrainedModel):
    """Base class: `model` is a longspan model, and checkpoints are those of `longspan.save`.

    Args:
        config: The configuration; see `LongspanConfig`.
    """

    config_class = LongspanConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ("ResidualBranch",)
    context_parallel_type = LongspanContextParallel
    _is_stateful = True  # assisted generation, which crops a cache, is refused
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
                setattr(module, "_is_hf_initialized", True)  # noqa: B010  keep longspan's initialization
        self.post_init()

    def _build(self, config: LongspanConfig) -> LanguageModel | EncoderDecoder | Classifier:
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a head that the checkpoint lacks; refuse to invent anything else."""
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
        """Write a checkpoint folder that `from_pretrained` and `longspan.load` read.

        Args:
            save_directory: The folder.
            **options: Those of `PreTrainedModel.save_pretrained`.
        """
        tensors = options.pop("state_dict", None) or self.state_dict()
        own = {name.removeprefix("model."): x for name, x in tensors.items() if name not in self._tied_weights_keys}
        adapters = getattr(self, "_hf_peft_config_loaded", False)
        options.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, state_dict=tensors if adapters else own, **options)
        if not adapters and options.get("is_main_process", True):
            path = Path(save_directory) / CONFIG
            config = json.loads(path.read_text(encoding="utf-8"))
            config |= describe(self.model) | {"sha256": digests(path.parent), "auto_map": LONGSPAN_MAP}
            write_stub(path.parent)
            write_atomically(path, json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, name: Any, *arguments: Any, **options: Any) -> Any:
        """Load a model as transformers does, also from the folder of a run; a LoRA adapter beside it needs PEFT.

        Raises:
            ValueError: There is an adapter, and PEFT is not installed: transformers would leave it out. Or the
                checkpoint is sharded.
        """
        name = checkpoint_of(name)
        if name is not None and (Path(name) / ADAPTER_CONFIG).is_file() and not is_peft_available():
            raise ValueError(f"{name} has a LoRA adapter, which needs peft: pip install 'longspan[hf]'")
        if name is not None and is_sharded(Path(name)):
            raise ValueError(f"{name} is a checkpoint in shards: `longspan export {name} FOLDER` writes one to open")
        return super().from_pretrained(name, *arguments, **options)

    def get_parameter(self, target: str) -> Any:
        """Return a parameter, or a buffer: transformers marks tied tensors, and layers may share a random table."""
        try:
            return super().get_parameter(target)
        except AttributeError:
            return self.get_buffer(target)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return _language_model(self.model).embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Raise ValueError: the vocabulary is fixed."""
        raise ValueError("the vocabulary is part of ModelConfig: build a model with another vocab_size")

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Module:
        """Change the vocabulary size: rows of the embedding and the output layer are copied, new ones are initialized.

        Args:
            new_num_tokens: The new number of tokens; None changes nothing.

        Returns:
            The token embedding.
        """
        model = _language_model(self.model)
        if isinstance(self.model, EncoderDecoder):
            raise ValueError("an encoder with a decoder has two vocabularies: build a model with other configurations")
        if new_num_tokens is None or new_num_tokens == model.config.vocab_size:
            return model.embedding
        wider = LanguageModel(replace(model.config, vocab_size=new_num_tokens)).to(self.device, self.dtype)
        rows = min(new_num_tokens, len(model.embedding.weight))
        with torch.no_grad():
            for name in ("embedding", "to_logits"):
                old, new = getattr(model, name), getattr(wider, name)
                if old is None:
                    continue
                new.weight[:rows] = old.weight[:rows]
                if getattr(old, "bias", None) is not None:
                    new.bias[:rows] = old.bias[:rows]
                setattr(model, name, new.requires_grad_(old.weight.requires_grad))
        model.config = self.model.config = replace(self.model.config, vocab_size=new_num_tokens)
        self.config.arguments = {"config": self.model.config.to_dict()}
        return model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Return None: the output layer is not replaceable."""
        return None

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers must be 1, got {every_n_layers}: all layers are recomputed or none")
        if getattr(gradient_checkpointing_func, "func", checkpoint) is not checkpoint:
            raise ValueError("offload must be False: layers are recomputed from activations on the device")
        self.gradient_checkpointing = enable
        for module in self.modules():
            if isinstance(module, Stack) and module.execution in ("keep", "recompute"):
                module.execution = "recompute" if enable else self.config.model.execution

    def _extend(
        self,
        model: LanguageModel,
        input_ids: Tensor,
        mask: Tensor | None,
        cache: StateCache | None,
        layers: list[Tensor] | None,
        **context: Any,
    ) -> tuple[Tensor, StateCache]:
        """Return the hidden states of new tokens and the cache after them; `layers` has the inputs of layers then."""
        B, T = input_ids.shape
        if cache is None:
            cache = StateCache(model.config, model.new_state(B, **context))
        elif not isinstance(cache, StateCache):
            raise ValueError(f"past_key_values must be what this model returned, got a {type(cache).__name__}")
        cache.check(model.config, B)
        key_mask = None if mask is None or (T == 1 and cache.seen_tokens) else mask[:, -T:].bool()
        hidden, cache.state = model.extend_hidden(input_ids, cache.state, key_mask=key_mask)
        cache.seen_tokens += T
        if layers is not None and key_mask is not None:
            span = PaddedSpan.of(key_mask)
            layers[:] = [span.unroll(x) for x in layers]
        return hidden, cache

    def _hidden(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past: StateCache | None = None,
        use_cache: bool | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **given: Any,
    ) -> tuple[Tensor, StateCache | None, tuple[Tensor, ...] | None]:
        """Return hidden states (B, T, dim), a cache if one is requested or given, and those of all layers likewise."""
        model = _language_model(self.model)
        with _embedded(model, input_ids, inputs_embeds) as tokens, _recorded(model, output_hidden_states) as layers:
            packing = _packing(tokens, attention_mask, given)
            mask, cache = None if attention_mask is None else attention_mask.bool(), None
            if past is not None or (use_cache and model.config.causal):
                if packing is not None:
                    raise ValueError(
                        "packed sequences are for training, not for generation: pad them, with attention_mask"
                    )
                hidden, cache = self._extend(model, tokens, mask, past, layers)
            else:
                if packing is None:
                    _check_positions(given.get("position_ids"), mask)
                hidden = model.hidden(tokens, key_mask=mask, packing=packing)
        return hidden, cache, None if layers is None else (*layers, hidden)

    def _token_loss(self, logits: Tensor, labels: Tensor | None, num_items_in_batch: Any) -> Tensor | None:
        """Return transformers' loss of this kind of model, None without labels."""
        if labels is None:
            return None
        shared = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
        return self.loss_function(logits=logits, labels=labels, **shared)


class LongspanModel(LongspanPreTrainedModel):
    """A language model without its output layer."""

    output_type = BaseModelOutputWithPast
    model: LanguageModel
    _keys_to_ignore_on_load_unexpected = (r"to_logits\.", r"from_dim\.")

    def _build(self, config: LongspanConfig) -> LanguageModel:
        model = LanguageModel(config.model)
        model.to_logits = model.from_dim = None
        return model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        **given: Any,
    ) -> Any:
        """Compute the last layer's hidden states (B, T, dim).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding.
            past_key_values: The cache that this model returned for the tokens before.
            use_cache: Whether to return a cache.
            **given: As in `LongspanForCausalLM.forward`.

        Returns:
            A `BaseModelOutputWithPast`, or a tuple with return_dict=False.
        """
        hidden, cache, states = self._hidden(input_ids, attention_mask, past_key_values, use_cache, **given)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, hidden_states=states)


class LongspanForCausalLM(LongspanPreTrainedModel, LongspanGenerationMixin):
    """A causal language model. `generate` decodes from a state; see `LongspanGenerationMixin`."""

    output_type = CausalLMOutputWithPast
    model: LanguageModel

    def _build(self, config: LongspanConfig) -> LanguageModel:
        if not config.model.causal:
            raise ValueError("a causal language model needs ModelConfig(causal=True)")
        return LanguageModel(config.model)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> Any:
        """Compute logits, and the loss if labels are given.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding.
            past_key_values: The cache that this model returned for the tokens before.
            labels: (B, T), −100 for tokens to ignore; shifted by one inside.
            use_cache: Whether to return a cache.
            logits_to_keep: How many logits at the end to compute, or which; 0 for all.
            num_items_in_batch: The divisor of the loss, by default the number of labels.
            **given: inputs_embeds, in place of input_ids; output_hidden_states, for the inputs of all layers and the
                output of the last; position_ids or cu_seq_lens_q and max_length_q of packed sequences, as
                `DataCollatorWithFlattening` makes them.

        Returns:
            A `CausalLMOutputWithPast`, or a tuple with return_dict=False.
        """
        hidden, cache, states = self._hidden(input_ids, attention_mask, past_key_values, use_cache, **given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(hidden[:, kept])
        loss = self._token_loss(logits, labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)


class LongspanForMaskedLM(LongspanPreTrainedModel):
    """A bidirectional language model that predicts masked tokens."""

    output_type = MaskedLMOutput
    model: LanguageModel

    def _build(self, config: LongspanConfig) -> LanguageModel:
        if config.model.causal:
            raise ValueError("a masked language model is bidirectional: it needs ModelConfig(causal=False)")
        return LanguageModel(config.model)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> Any:
        """Compute logits, and the loss if labels are given.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding.
            labels: (B, T), −100 for tokens to ignore.
            num_items_in_batch: The divisor of the loss, by default the number of labels.
            **given: As in `LongspanForCausalLM.forward`.

        Returns:
            A `MaskedLMOutput`, or a tuple with return_dict=False.
        """
        hidden, _, states = self._hidden(input_ids, attention_mask, **given)
        logits = self.model.logits(hidden)
        loss = self._token_loss(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=states)


class LongspanForSequenceClassification(LongspanPreTrainedModel):
    """A classifier of the mean over real tokens. A language model's checkpoint loads into its body."""

    output_type = SequenceClassifierOutput
    model: Classifier
    _keys_to_ignore_on_load_unexpected = (r"to_logits\.", r"from_dim\.")

    def _build(self, config: LongspanConfig) -> Classifier:
        return _classifier(config, config.num_labels, "mean")

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        config.arguments = {"config": self.model.config.to_dict()}

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load a classifier, or a language model's checkpoint under a new head; as in the base class."""
        body = r"^(?:model\.)?(?=(?:embedding|ngrams|positions|to_dim|transformer)\.)"
        options.setdefault("key_mapping", {body: "model.body."})
        return super().from_pretrained(*arguments, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Compute logits (B, num_labels), and the loss if labels are given.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding.
            labels: (B,), or as num_labels and problem_type require.
            **given: inputs_embeds, in place of input_ids; output_hidden_states, for the inputs of all layers and the
                output of the last; others are refused unless None or False.

        Returns:
            A `SequenceClassifierOutput`, or a tuple with return_dict=False.
        """
        logits, states = self._class_logits(input_ids, attention_mask, given)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=states)

    def _class_logits(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, given: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return logits, and the hidden states of all layers if output_hidden_states is among the arguments."""
        _refuse_unknown({name: x for name, x in given.items() if name not in ("inputs_embeds", "output_hidden_states")})
        hidden, _, states = self._hidden(input_ids, attention_mask, **given)
        return self.model.logits(hidden, key_mask=None if attention_mask is None else attention_mask.bool()), states


class LongspanForTokenClassification(LongspanForSequenceClassification):
    """A classifier of each token. A language model's checkpoint loads into its body."""

    output_type = TokenClassifierOutput

    def _build(self, config: LongspanConfig) -> Classifier:
        return _classifier(config, config.num_labels, "none")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Compute logits (B, T, num_labels), and the loss if labels are given.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding.
            labels: (B, T), −100 for tokens to ignore.
            **given: As in `LongspanForSequenceClassification.forward`.

        Returns:
            A `TokenClassifierOutput`, or a tuple with return_dict=False.
        """
        logits, states = self._class_logits(input_ids, attention_mask, given)
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=states)


class LongspanForQuestionAnswering(LongspanForTokenClassification):
    """Scores of each token as the start and the end of an answer. A language model's checkpoint loads into its body."""

    output_type = QuestionAnsweringModelOutput

    def _build(self, config: LongspanConfig) -> Classifier:
        return _classifier(config, 2, "none")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Compute start_logits and end_logits (B, T), and the loss if both positions are given.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for padding.
            start_positions: (B,), the first token of each answer.
            end_positions: (B,), the last token of each answer.
            **given: As in `LongspanForSequenceClassification.forward`.

        Returns:
            A `QuestionAnsweringModelOutput`, or a tuple with return_dict=False.
        """
        logits, states = self._class_logits(input_ids, attention_mask, given)
        start, end = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end, hidden_states=states)


class LongspanForSeq2SeqLM(LongspanPreTrainedModel, LongspanGenerationMixin):
    """A bidirectional encoder and a causal decoder with cross-attention to it."""

    model: EncoderDecoder

    def _build(self, config: LongspanConfig) -> EncoderDecoder:
        if not config.is_encoder_decoder:
            raise ValueError("a sequence-to-sequence model needs LongspanConfig(decoder, encoder=…)")
        both = {name: config.arguments[name] for name in ("pad_token", "tie_embeddings")}
        return EncoderDecoder(config.encoder, config.model, **both)

    def get_encoder(self, *_: Any) -> _Encoder:
        """Return the encoder as transformers calls it."""
        return _Encoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return labels (B, T) shifted right by one, after the decoder's start token."""
        start = self.generation_config.decoder_start_token_id
        first = labels.new_full((len(labels), 1), self.model.pad_token if start is None else start)
        shifted = torch.cat([first, labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == -100, self.model.pad_token)

    @can_return_tuple
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
        num_items_in_batch: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **given: Any,
    ) -> Any:
        """Compute the decoder's logits, and the loss if labels are given.

        Args:
            input_ids: (B, S) source tokens; not needed with encoder_outputs.
            attention_mask: (B, S), 0 for padding.
            decoder_input_ids: (B, T); by default the labels shifted right by one.
            decoder_attention_mask: (B, T), 0 for padding.
            encoder_outputs: What the encoder returned.
            past_key_values: The cache that this model returned for the tokens before.
            labels: (B, T), −100 for tokens to ignore; label t follows decoder_input_ids up to t.
            use_cache: Whether to return a cache.
            num_items_in_batch: The divisor of the loss, by default the number of labels.
            inputs_embeds: (B, S, embed_dim), in place of input_ids.
            decoder_inputs_embeds: (B, T, embed_dim), in place of decoder_input_ids.
            output_hidden_states: Whether to return the inputs of all layers of encoder and decoder, and their outputs.
            **given: Refused unless None or False.

        Returns:
            A `Seq2SeqLMOutput`, or a tuple with return_dict=False.
        """
        _refuse_unknown(given)
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask, inputs_embeds, output_hidden_states)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("decoder_input_ids, decoder_inputs_embeds or labels is required")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        context = {
            "context": encoder_outputs[0],
            "context_mask": None if attention_mask is None else attention_mask.bool(),
        }
        decoder, cache = self.model.decoder, None
        mask = None if decoder_attention_mask is None else decoder_attention_mask.bool()
        embedded = _embedded(decoder, decoder_input_ids, decoder_inputs_embeds)
        with embedded as tokens, _recorded(decoder, output_hidden_states) as layers:
            if past_key_values is not None or use_cache:
                hidden, cache = self._extend(decoder, tokens, mask, past_key_values, layers, **context)
            else:
                hidden = decoder.hidden(tokens, key_mask=mask, **context)
        logits = decoder.logits(hidden)
        loss = None
        if labels is not None:
            total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            loss = total / ((labels != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            decoder_hidden_states=None if layers is None else (*layers, hidden),
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=encoder_outputs.hidden_states if output_hidden_states else None,
        )


class _Encoder:
    """The encoder as `generate` calls it, once before the first token."""

    main_input_name = "input_ids"

    def __init__(self, model: EncoderDecoder) -> None:
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutput:
        """Return the encoder's hidden states (B, S, dim), and those of its layers if requested."""
        encoder = self.model.encoder
        with _embedded(encoder, input_ids, inputs_embeds) as tokens, _recorded(encoder, output_hidden_states) as layers:
            mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
            hidden = self.model.encode(tokens, mask.bool())[0]
        states = None if layers is None else (*layers, hidden)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=states)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        *,
        return_dict: bool = True,
        **given: Any,
    ) -> BaseModelOutput:
        _refuse_unknown(given)
        return self.forward(input_ids, attention_mask, inputs_embeds, output_hidden_states)


@contextmanager
def _recorded(model: LanguageModel, wanted: bool | None) -> Iterator[list[Tensor] | None]:
    """Yield a list that the input of each layer is added to if requested, None otherwise."""
    if not wanted:
        yield None
        return
    stack = model.transformer.stack
    if stack.topology not in ("single", "parallel"):
        raise ValueError(f"output_hidden_states needs one residual stream, this model has residual={stack.topology!r}")
    inputs: list[Tensor] = []
    branches: list[Any] = [module for module in stack.branches if isinstance(module, ResidualBranch)]
    first = branches[:: len(branches) // model.config.depth]
    hooks = [branch.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])) for branch in first]
    for branch in first:
        branch.extend = functools.partial(_record_extend, inputs, branch.extend)
    try:
        yield inputs
    finally:
        for hook, branch in zip(hooks, first, strict=True):
            hook.remove()
            del branch.extend


def _record_extend(inputs: list[Tensor], extend: Any, x: Tensor, *rest: Any) -> Any:
    inputs.append(x)
    return extend(x, *rest)


@contextmanager
def _embedded(model: LanguageModel, input_ids: Tensor | None, vectors: Tensor | None) -> Iterator[Tensor]:
    """Yield the tokens; if vectors (B, T, embed_dim) are given, any tokens, whose embedding they are meanwhile."""
    if vectors is None:
        if input_ids is None:
            raise ValueError("input_ids or inputs_embeds is required")
        yield input_ids
        return
    if input_ids is not None:
        raise ValueError("input_ids and inputs_embeds exclude each other: give one of them")
    if model.ngrams is not None or model.config.attention.value_embedding:
        raise ValueError("this model needs the tokens beside their embeddings: give input_ids, not inputs_embeds")
    width = model.embedding.embedding_dim
    if vectors.ndim != 3 or vectors.shape[2] != width:
        raise ValueError(f"inputs_embeds must be (B, T, {width}), got {tuple(vectors.shape)}")
    hook = model.embedding.register_forward_hook(lambda *_: vectors)
    try:
        yield torch.zeros(vectors.shape[:2], dtype=torch.int64, device=vectors.device)
    finally:
        hook.remove()


def _classifier(config: LongspanConfig, num_classes: int, pooling: Literal["mean", "none"]) -> Classifier:
    if config.model.vocab_size is None:
        raise ValueError(
            "this model reads vectors, and the classes of transformers read tokens: open it with longspan.load, or "
            "give its folder to longspan predict"
        )
    return Classifier(replace(config.model, num_classes=num_classes, pooling=pooling))


def _language_model(model: LanguageModel | EncoderDecoder | Classifier) -> LanguageModel:
    if isinstance(model, LanguageModel):
        return model
    body = model.decoder if isinstance(model, EncoderDecoder) else model.body
    assert isinstance(body, LanguageModel)
    return body


def _packing(input_ids: Tensor, attention_mask: Tensor | None, given: Mapping[str, Any]) -> Packing | None:
    """Return the packing that `DataCollatorWithFlattening` describes by offsets, or by positions that restart at 0."""
    positions, offsets = given.get("position_ids"), given.get("cu_seq_lens_q")
    _refuse_unknown({name: value for name, value in given.items() if name not in _PACKING})
    if offsets is not None:
        return Packing(offsets.int(), int(given["max_length_q"]))
    if positions is None or attention_mask is not None or len(input_ids) != 1:
        return None
    starts = (positions[0] == 0).nonzero()[:, 0]
    if len(starts) < 2:
        return None
    ends = starts.new_tensor([positions.shape[1]])
    offsets = torch.cat([starts, ends]).int()
    return Packing(offsets, int((offsets[1:] - offsets[:-1]).max()))


def _check_positions(positions: Tensor | None, mask: Tensor | None) -> None:
    """Refuse positions other than those that follow from the mask."""
    if positions is None:
        return
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    if bool(((positions != real.long().cumsum(1) - 1) & real).any()):
        raise ValueError("position_ids must count the real tokens of each row from 0, or restart in one packed row")


_PACKING = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    """Refuse arguments that would have no effect, unless they are None or False."""
    found = sorted(name for name, value in given.items() if value is not None and value is not False)
    if found:
        raise ValueError(f"longspan models do not take {', '.join(found)}: leave it out")
