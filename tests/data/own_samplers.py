"""Samplers for data.sampler, right and wrong."""


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


class TooFar(Backwards):
    def draw(self):
        return self.num_prompts


class Fails(Backwards):
    def draw(self):
        raise RuntimeError("no prompt left")


class WithoutState:
    def __init__(self, num_prompts, seed):
        pass

    def draw(self):
        return 0
