"""What the books raise."""


class ContractError(AssertionError):
    """Something that must not be done, or not be let happen."""
