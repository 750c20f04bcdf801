from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_DRAFT: _ClassVar[Action]
    ACTION_VERIFY: _ClassVar[Action]
    ACTION_OPEN: _ClassVar[Action]
    ACTION_STOP: _ClassVar[Action]
    ACTION_CLOSE: _ClassVar[Action]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_EOS: _ClassVar[Finish]
    FINISH_STOP_STRING: _ClassVar[Finish]
    FINISH_SENTENCES: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]

class Execution(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_UNSPECIFIED: _ClassVar[Execution]
    EXECUTION_EXACT: _ClassVar[Execution]
    EXECUTION_THROUGHPUT: _ClassVar[Execution]
ACTION_DRAFT: Action
ACTION_VERIFY: Action
ACTION_OPEN: Action
ACTION_STOP: Action
ACTION_CLOSE: Action
FINISH_NONE: Finish
FINISH_EOS: Finish
FINISH_STOP_STRING: Finish
FINISH_SENTENCES: Finish
FINISH_LENGTH: Finish
EXECUTION_UNSPECIFIED: Execution
EXECUTION_EXACT: Execution
EXECUTION_THROUGHPUT: Execution

class DecodingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "no_repeat_ngram_size", "content_penalty", "content_ngram_size", "no_adjacent_repeat", "comma_gap", "full_stop_gap", "full_stop_shift", "sentences", "min_new_tokens", "max_new_tokens", "stop", "frequency_penalty", "presence_penalty", "logit_bias", "min_call_prob", "stop_token_ids", "grammar", "think_budget", "think_start", "think_end", "penalty_window")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    NO_ADJACENT_REPEAT_FIELD_NUMBER: _ClassVar[int]
    COMMA_GAP_FIELD_NUMBER: _ClassVar[int]
    FULL_STOP_GAP_FIELD_NUMBER: _ClassVar[int]
    FULL_STOP_SHIFT_FIELD_NUMBER: _ClassVar[int]
    SENTENCES_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_CALL_PROB_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    THINK_BUDGET_FIELD_NUMBER: _ClassVar[int]
    THINK_START_FIELD_NUMBER: _ClassVar[int]
    THINK_END_FIELD_NUMBER: _ClassVar[int]
    PENALTY_WINDOW_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    content_penalty: float
    content_ngram_size: int
    no_adjacent_repeat: bool
    comma_gap: int
    full_stop_gap: int
    full_stop_shift: float
    sentences: int
    min_new_tokens: int
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    min_call_prob: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    think_budget: int
    think_start: str
    think_end: str
    penalty_window: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., no_repeat_ngram_size: _Optional[int] = ..., content_penalty: _Optional[float] = ..., content_ngram_size: _Optional[int] = ..., no_adjacent_repeat: _Optional[bool] = ..., comma_gap: _Optional[int] = ..., full_stop_gap: _Optional[int] = ..., full_stop_shift: _Optional[float] = ..., sentences: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., min_call_prob: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., think_budget: _Optional[int] = ..., think_start: _Optional[str] = ..., think_end: _Optional[str] = ..., penalty_window: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("fingerprint", "prompt_ids", "committed_ids", "params", "media", "cache_scope", "target", "num_best")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_BEST_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    params: DecodingParams
    media: _containers.RepeatedCompositeFieldContainer[Media]
    cache_scope: str
    target: TargetId
    num_best: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[DecodingParams, _Mapping]] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., cache_scope: _Optional[str] = ..., target: _Optional[_Union[TargetId, _Mapping]] = ..., num_best: _Optional[int] = ...) -> None: ...

class TargetId(_message.Message):
    __slots__ = ("weights", "context_len")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    weights: bytes
    context_len: int
    def __init__(self, weights: _Optional[bytes] = ..., context_len: _Optional[int] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("num_mels", "features")
    NUM_MELS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    num_mels: int
    features: bytes
    def __init__(self, num_mels: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("logprob", "best_ids", "best_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    BEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BEST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    best_ids: _containers.RepeatedScalarFieldContainer[int]
    best_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., best_ids: _Optional[_Iterable[int]] = ..., best_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("session", "epoch", "base", "catch_up_ids", "draft_ids", "digest", "opening", "action", "write", "branch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    base: int
    catch_up_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    opening: Opening
    action: Action
    write: int
    branch: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., base: _Optional[int] = ..., catch_up_ids: _Optional[_Iterable[int]] = ..., draft_ids: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., action: _Optional[_Union[Action, str]] = ..., write: _Optional[int] = ..., branch: _Optional[int] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("base", "num_accepted", "token_id", "finish", "audit", "cost", "target", "last", "scores", "first", "branch", "num_fed")
    BASE_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    NUM_FED_FIELD_NUMBER: _ClassVar[int]
    base: int
    num_accepted: int
    token_id: int
    finish: Finish
    audit: bytes
    cost: _containers.RepeatedScalarFieldContainer[int]
    target: TargetId
    last: bool
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    first: bool
    branch: int
    num_fed: int
    def __init__(self, base: _Optional[int] = ..., num_accepted: _Optional[int] = ..., token_id: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., audit: _Optional[bytes] = ..., cost: _Optional[_Iterable[int]] = ..., target: _Optional[_Union[TargetId, _Mapping]] = ..., last: _Optional[bool] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., first: _Optional[bool] = ..., branch: _Optional[int] = ..., num_fed: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ("vocabulary",)
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    vocabulary: bool
    def __init__(self, vocabulary: _Optional[bool] = ...) -> None: ...

class GetInfoReply(_message.Message):
    __slots__ = ("version", "model", "fingerprint", "vocab_size", "context_len", "execution", "max_block", "max_sessions", "num_sessions", "weights", "vocabulary")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    fingerprint: bytes
    vocab_size: int
    context_len: int
    execution: Execution
    max_block: int
    max_sessions: int
    num_sessions: int
    weights: str
    vocabulary: bytes
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., context_len: _Optional[int] = ..., execution: _Optional[_Union[Execution, str]] = ..., max_block: _Optional[int] = ..., max_sessions: _Optional[int] = ..., num_sessions: _Optional[int] = ..., weights: _Optional[str] = ..., vocabulary: _Optional[bytes] = ...) -> None: ...
