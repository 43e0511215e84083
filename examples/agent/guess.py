"""A game of several turns: find a number in a range of 31 with six guesses; the answer to a guess is the range that is left.

It shows how small an environment is, and imports nothing of megarl. Halving the range always wins, guessing at random four times in five,
guessing the lower end one time in five.
"""

import random

SIZE, GUESSES = 31, 6
HELD_OUT = 1_000_000_000  # seeds from here on draw games that lower ones never draw


def held_out(low: int, secret: int) -> bool:
    """One pair in eight of a range and a number."""
    return random.Random(f"{low}:{secret}").random() < 0.125


class Guess:
    """One game."""

    def reset(self, seed: int) -> str:
        """Begins the game of this seed. Returns the range, say "12-42"."""
        draw = random.Random(seed)
        while True:
            self.low = draw.randrange(10, 100 - SIZE)
            self.high = self.low + SIZE - 1
            self.secret = draw.randint(self.low, self.high)
            if held_out(self.low, self.secret) == (seed >= HELD_OUT):
                break
        self.left = GUESSES
        return self.range

    @property
    def range(self) -> str:
        """What is still possible."""
        return f"{self.low}-{self.high}"

    def step(self, text: str, tokens: list[int], finished: bool) -> tuple[str, float, bool]:
        """Takes a guess. Returns what is left, the reward (1 for the number) and whether the game is over; what is no guess costs one."""
        self.left -= 1
        guess = int(text) if finished and text.isascii() and text.isdigit() and len(text) == 2 else None
        if guess == self.secret:
            return "", 1.0, True
        if guess is not None and self.low <= guess <= self.high:
            self.low, self.high = (guess + 1, self.high) if guess < self.secret else (self.low, guess - 1)
        return self.range, 0.0, self.left == 0

    def close(self) -> None:
        """Nothing is held."""
