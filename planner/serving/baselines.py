"""tmp"""


def serving_baselines(chains, total):
    return {}
