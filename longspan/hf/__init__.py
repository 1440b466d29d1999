"""longspan in transformers: importing this registers its models with the Auto classes.

import longspan.hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder)    # one that `longspan train` wrote, or `save_pretrained`
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from longspan.hf.config import LongspanConfig
from longspan.hf.models import (
    LongspanForCausalLM,
    LongspanForMaskedLM,
    LongspanForSeq2SeqLM,
    LongspanForSequenceClassification,
    LongspanModel,
)

__all__ = [
    "LongspanConfig",
    "LongspanForCausalLM",
    "LongspanForMaskedLM",
    "LongspanForSeq2SeqLM",
    "LongspanForSequenceClassification",
    "LongspanModel",
]

AutoConfig.register("longspan", LongspanConfig)
AutoModel.register(LongspanConfig, LongspanModel)
AutoModelForCausalLM.register(LongspanConfig, LongspanForCausalLM)
AutoModelForMaskedLM.register(LongspanConfig, LongspanForMaskedLM)
AutoModelForSequenceClassification.register(LongspanConfig, LongspanForSequenceClassification)
AutoModelForSeq2SeqLM.register(LongspanConfig, LongspanForSeq2SeqLM)
