"""Why a metric left its band: explanations, each tested by training the step again."""
