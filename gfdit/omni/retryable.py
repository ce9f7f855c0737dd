"""Errors after which the same request may well succeed: what they say, and what HTTP makes of it.

vLLM-Omni keeps the status of an error only if it blames the client (4xx). Others reach the endpoints as a text.
"""

SEND_AGAIN = "may be sent again"
"""Part of the text of every such error, and of no other."""


def retryable(error: str) -> str:
    """``error`` as a text that says so."""
    return error if SEND_AGAIN in error else f"{error} (the request {SEND_AGAIN})"
