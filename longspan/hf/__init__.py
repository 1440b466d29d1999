"""longspan in transformers. Importing this module registers its models with the Auto classes.

```python
import longspan.hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder)  # of `longspan train`, `longspan.save` or `save_pretrained`
```
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from longspan.hf.config import LongspanConfig
from longspan.hf.models import (
    LongspanForCausalLM,
    LongspanForMaskedLM,
    LongspanForQuestionAnswering,
    LongspanForSeq2SeqLM,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
    LongspanModel,
)
from longspan.hf.native import to_language_model
from longspan.hf.swap import SwappedConfig, SwappedPreTrainedModel, load_swapped, swap_attention
from longspan.hf.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "LongspanConfig",
    "LongspanForCausalLM",
    "LongspanForMaskedLM",
    "LongspanForQuestionAnswering",
    "LongspanForSeq2SeqLM",
    "LongspanForSequenceClassification",
    "LongspanForTokenClassification",
    "LongspanModel",
    "load_swapped",
    "swap_attention",
    "to_language_model",
]

AutoConfig.register("longspan", LongspanConfig)
AutoModel.register(LongspanConfig, LongspanModel)
AutoModelForCausalLM.register(LongspanConfig, LongspanForCausalLM)
AutoConfig.register("longspan_swap", SwappedConfig)
for opener in SwappedPreTrainedModel.__subclasses__():
    opener.auto_class.register(SwappedConfig, opener)
AutoModelForMaskedLM.register(LongspanConfig, LongspanForMaskedLM)
AutoModelForSequenceClassification.register(LongspanConfig, LongspanForSequenceClassification)
AutoModelForTokenClassification.register(LongspanConfig, LongspanForTokenClassification)
AutoModelForQuestionAnswering.register(LongspanConfig, LongspanForQuestionAnswering)
AutoModelForSeq2SeqLM.register(LongspanConfig, LongspanForSeq2SeqLM)
AutoTokenizer.register(LongspanConfig, slow_tokenizer_class=ByteTokenizer)
