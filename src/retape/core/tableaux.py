"""Coefficients of explicit Runge-Kutta methods, each with its publication.

A step of size h from (t, y): k_i = f(t + c_i h, y + h sum_j a_ij k_j), y' = y + h sum_i b_i k_i.
`error` holds b minus the weights of the embedded method of one order less; `dense[i]` the coefficients of theta, theta^2, ... in the
weight of k_i at t + theta h: the solution anywhere inside a step without another evaluation. The steps themselves are
in `retape.torch.ode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from retape.core.errors import InvalidInput

Row = tuple[float, ...]


class Method(Enum):
    """The methods, by the names that `odeint` takes."""

    EULER = "euler"
    MIDPOINT = "midpoint"
    RK4 = "rk4"
    DOPRI5 = "dopri5"
    TSIT5 = "tsit5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tableau:
    """One method. Adaptive ones have `error` and `dense`, and their last stage is the first of the next step."""

    method: Method
    order: int
    source: str
    c: Row
    a: tuple[Row, ...]
    b: Row
    error: Row = ()
    dense: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.b)
        if len(self.c) != stages or [len(row) for row in self.a] != list(range(stages)):
            raise InvalidInput(
                f"A tableau of {stages} stages has {len(self.c)} times and rows of {[len(r) for r in self.a]}"
            )
        if self.adaptive and not (len(self.error) == len(self.dense) == stages and self.a[-1] == self.b[:-1]):
            raise InvalidInput(
                f"The embedded pair of {self.method.value} is not one of {stages} stages whose last is at the solution"
            )

    @property
    def adaptive(self) -> bool:
        """True if the method estimates its error, by which step sizes can be chosen."""
        return bool(self.error)


EULER = Tableau(
    method=Method.EULER,
    order=1,
    source="L. Euler, Institutionum calculi integralis I (1768), section 650",
    c=(0.0,),
    a=((),),
    b=(1.0,),
)

MIDPOINT = Tableau(
    method=Method.MIDPOINT,
    order=2,
    source="C. Runge, Ueber die numerische Auflösung von Differentialgleichungen, Math. Ann. 46 (1895) 167-178",
    c=(0.0, 1 / 2),
    a=((), (1 / 2,)),
    b=(0.0, 1.0),
)

# The 3/8 rule, which torchdiffeq too calls rk4: the same order as the classical one, with smaller error constants.
RK4 = Tableau(
    method=Method.RK4,
    order=4,
    source="W. Kutta, Beitrag zur näherungsweisen Integration totaler Differentialgleichungen, Z. Math. Phys. 46 (1901) 435-453",
    c=(0.0, 1 / 3, 2 / 3, 1.0),
    a=((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)),
    b=(1 / 8, 3 / 8, 3 / 8, 1 / 8),
)


def _quartic(b: Row, middle: Row) -> tuple[Row, ...]:
    """The quartic through both ends with their slopes and through the middle, as weights of the stages.

    Five conditions on y(theta) = y + h sum_i w_i(theta) k_i: w = 0 and w' = (1, 0, ..., 0) at 0; w = b and w' = (0, ..., 0, 1) at 1;
    w = middle at 1/2.
    """
    last = len(b) - 1
    rows = []
    for i, (end, mid) in enumerate(zip(b, middle, strict=True)):
        first, final = float(i == 0), float(i == last)
        second = final - 4 * first - 5 * end + 16 * mid
        third = 5 * first - 3 * final + 14 * end - 32 * mid
        fourth = 2 * (final - first) - 8 * end + 16 * mid
        rows.append((first, second, third, fourth))
    return tuple(rows)


_DOPRI5_B = (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84, 0.0)
# The embedded weights are those of L. Shampine (1986), and so is the middle: torchdiffeq's choice, so that its steps are ours.
_DOPRI5_EMBEDDED = (1951 / 21600, 0.0, 22642 / 50085, 451 / 720, -12231 / 42400, 649 / 6300, 1 / 60)
_DOPRI5_MIDDLE = (
    6025192743 / 30085553152 / 2,
    0.0,
    51252292925 / 65400821598 / 2,
    -2691868925 / 45128329728 / 2,
    187940372067 / 1594534317056 / 2,
    -1776094331 / 19743644256 / 2,
    11237099 / 235043384 / 2,
)

DOPRI5 = Tableau(
    method=Method.DOPRI5,
    order=5,
    source="J. R. Dormand and P. J. Prince, A family of embedded Runge-Kutta formulae, J. Comput. Appl. Math. 6 (1980) 19-26; "
    "error weights and middle: L. F. Shampine, Some practical Runge-Kutta formulas, Math. Comp. 46 (1986) 135-150",
    c=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
    a=(
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        _DOPRI5_B[:-1],
    ),
    b=_DOPRI5_B,
    error=tuple(own - other for own, other in zip(_DOPRI5_B, _DOPRI5_EMBEDDED, strict=True)),
    dense=_quartic(_DOPRI5_B, _DOPRI5_MIDDLE),
)

_TSIT5_B = (
    0.09646076681806523,
    0.01,
    0.4798896504144996,
    1.379008574103742,
    -3.290069515436081,
    2.324710524099774,
    0.0,
)

# The paper prints the differences as "b hat", and the sign of the last of them does not fit the others: the one below meets the order
# conditions (tests/core/test_tableaux.py), as in other implementations of this method.
TSIT5 = Tableau(
    method=Method.TSIT5,
    order=5,
    source="Ch. Tsitouras, Runge-Kutta pairs of order 5(4) satisfying only the first column simplifying assumption, "
    "Comput. Math. Appl. 62 (2011) 770-775",
    c=(0.0, 0.161, 0.327, 0.9, 0.9800255409045097, 1.0, 1.0),
    a=(
        (),
        (0.161,),
        (-0.008480655492356989, 0.335480655492357),
        (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
        (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
        (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383),
        _TSIT5_B[:-1],
    ),
    b=_TSIT5_B,
    error=(
        -0.00178001105222577714,
        -0.0008164344596567469,
        0.007880878010261995,
        -0.1447110071732629,
        0.5823571654525552,
        -0.45808210592918697,
        1 / 66,
    ),
    dense=(
        (1.0, -2.763706197274826, 2.9132554618219126, -1.0530884977290216),
        (0.0, 0.1317, -0.2234, 0.1017),
        (0.0, 3.9302962368947516, -5.941033872131505, 2.490627285651253),
        (0.0, -12.411077166933676, 30.33818863028232, -16.548102889244902),
        (0.0, 37.50931341651104, -88.1789048947664, 47.37952196281928),
        (0.0, -27.896526289197286, 65.09189467479366, -34.87065786149661),
        (0.0, 1.5, -4.0, 2.5),
    ),
)

TABLEAUX: dict[Method, Tableau] = {tableau.method: tableau for tableau in (EULER, MIDPOINT, RK4, DOPRI5, TSIT5)}


def find_tableau(method: str) -> Tableau:
    """Return the tableau of a method by its name."""
    try:
        return TABLEAUX[Method(method)]
    except ValueError:
        known = ", ".join(sorted(member.value for member in Method))
        raise InvalidInput(f"No method {method!r}; there are {known}") from None
