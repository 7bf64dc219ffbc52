"""A reward that differs between almost any two responses, so that a wrong sample cannot hide."""


def compute_score(response: str, ground_truth: str) -> float:
    """In [0, 1): shared characters count most, then the response's own characters."""
    shared = sum(a == b for a, b in zip(response, ground_truth, strict=False))
    return (shared + sum(map(ord, response)) % 97 / 97) / (1 + max(len(response), len(ground_truth)))
