"""Serving: an engine that decodes many requests together, with a prefix cache and sessions."""

from longspan.serve.engine import Engine as Engine
from longspan.serve.engine import EngineClosedError as EngineClosedError
from longspan.serve.engine import QueueFullError as QueueFullError
from longspan.serve.request import Completion as Completion
from longspan.serve.request import Delta as Delta
from longspan.serve.request import Generation as Generation
from longspan.serve.request import Request as Request
