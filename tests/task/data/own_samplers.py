"""Samplers for data.sampler, valid and invalid ones."""

import numpy as np


class Backwards:
    """Draw the last prompt first, and draw prompts again whose groups failed."""

    def __init__(self, num_prompts, seed, *, again=True):
        self.num_prompts, self.seed, self.again = num_prompts, seed, again
        self.place, self.failed = 0, []

    def draw(self):
        if self.failed:
            return self.failed.pop()
        self.place += 1
        return self.num_prompts - 1 - (self.place - 1) % self.num_prompts

    def learn(self, index, rewards):
        if self.again and not any(rewards):
            self.failed.append(index)

    def save(self):
        return {"place": self.place, "failed": self.failed}

    def restore(self, state):
        self.place, self.failed = state["place"], list(state["failed"])


class Numpy(Backwards):
    def draw(self):
        return np.int64(super().draw())


class TooFar(Backwards):
    def draw(self):
        return self.num_prompts


class Half(Backwards):
    def draw(self):
        return super().draw() / 2


class FailsLater(Backwards):
    """Sampler that is valid for two prompts, so that the trial at the start passes."""

    def draw(self):
        index = super().draw()
        return index if self.num_prompts == 2 else index + 0.5


class SavesNumpy(Backwards):
    """Sampler whose state holds a NumPy mean as soon as it has learned."""

    def learn(self, _index, rewards):
        self.failed.append(np.mean(rewards, dtype=np.float32))


class SavesNumpyLater(SavesNumpy):
    def learn(self, index, rewards):
        if self.num_prompts > 2:
            super().learn(index, rewards)


class SavesByIndex(Backwards):
    """Sampler whose state has integer keys, which JSON turns into texts."""

    def save(self):
        return {7: self.place}

    def restore(self, state):
        self.place = state[7]


class WithoutSeed:
    def __init__(self, num_prompts):
        pass


class Fails(Backwards):
    def draw(self):
        raise RuntimeError("no prompt left")


class Ends(Backwards):
    """Sampler that draws each prompt once."""

    def __init__(self, num_prompts, seed):
        super().__init__(num_prompts, seed)
        self.rest = iter(range(num_prompts))

    def draw(self):
        return next(self.rest)


class FailsToLearn(Backwards):
    def learn(self, _index, rewards):
        self.failed.append(int(1.0 / len(rewards)))


class WithoutState:
    def __init__(self, num_prompts, seed):
        pass

    def draw(self):
        return 0
