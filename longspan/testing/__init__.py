"""Check a mechanism against the laws of the protocol; needs no pytest.

```python
from longspan.testing import check_mechanism

check_mechanism(lambda: MyAttention(num_heads=4, head_dim=8, num_kv_heads=2, decay=0.9))
```
"""

from longspan.testing.laws import LAWS, check_mechanism

__all__ = ["LAWS", "check_mechanism"]
