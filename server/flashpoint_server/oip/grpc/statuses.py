"""The status with which gRPC tells each refusal, by the refusal's code; gRPC's own names."""

STATUSES = {
    "malformed_body": "INVALID_ARGUMENT",
    "malformed_head": "INVALID_ARGUMENT",
    "unauthorized": "UNAUTHENTICATED",
    "forbidden": "PERMISSION_DENIED",
    "cross_site": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "method_not_allowed": "UNIMPLEMENTED",
    "not_acceptable": "UNIMPLEMENTED",
    "body_timeout": "DEADLINE_EXCEEDED",
    "body_too_large": "RESOURCE_EXHAUSTED",  # as gRPC says it of a message over its own limit
    "work_too_large": "INVALID_ARGUMENT",
    "unsupported_media_type": "UNIMPLEMENTED",
    "host_not_allowed": "PERMISSION_DENIED",
    "invalid_request": "INVALID_ARGUMENT",
    "queue_full": "RESOURCE_EXHAUSTED",
    "key_limit": "RESOURCE_EXHAUSTED",
    "head_too_large": "RESOURCE_EXHAUSTED",
    "internal_error": "INTERNAL",
    "transfer_encoding": "UNIMPLEMENTED",
    "not_ready": "UNAVAILABLE",
    "draining": "UNAVAILABLE",
    "out_of_memory": "UNAVAILABLE",
    "engine_lost": "UNAVAILABLE",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
}
