"""The reward of the recorded `ppo`: how many of the response's letters are digits."""


def compute_score(response: str) -> float:
    """0 to 1."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)
