"""Single operators on images of every dtype, on the smallest sizes too: values and gradients are PyTorch's, or refused.

`python bench/operators.py` runs many more.
"""

import pytest

from tests.exactness.generated_operators import make_case, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # what PyTorch warns of when it is used in odd ways


@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 60))])
def test_values_and_gradients_are_pytorchs(seed):
    case = make_case(seed)
    assert outcome(case) in ("same", "both refuse", "more", "no image"), case
