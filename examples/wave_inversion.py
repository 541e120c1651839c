"""Seismic inversion: find the wave speed in the ground from recorded waves.

    python examples/wave_inversion.py [--picture FILE.svg]

Sources along the upper side of a square emit waves; receivers along the other three sides record them. The ground contains a lens with
a lower wave speed. Gradients of the misfit are computed through every time step of the wave equation with respect to a coarse
map of speeds, which gradient descent then corrects. `retape.scan` reverses the simulation from a few stored wave fields: its carry
is the last two of them. The picture shows the true map, the initial map and the result.
"""

import argparse
from itertools import groupby

import torch
from torch.nn import functional as F

import retape

SIZE, STEPS, SHOTS, ROUNDS, COARSE = 24, 120, 4, 25, 6
TIME_STEP = 0.4  # in units of a cell's width over the background speed: below 0.7 the scheme is stable
LAPLACE = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]


def true_speed():
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    lens = torch.exp(-(((rows - 12.0) / 4.0) ** 2 + ((columns - 11.0) / 5.0) ** 2))
    return 1.0 - 0.25 * lens


def sources():
    """Return the positions of the sources, and the wavelet at each time step."""
    places = torch.zeros(SHOTS, 1, SIZE, SIZE)
    for shot in range(SHOTS):
        places[shot, 0, 2, 4 + shot * (SIZE - 8) // (SHOTS - 1)] = 1.0
    times = (torch.arange(STEPS) - 22.0) * TIME_STEP
    bell = (0.35 * times) ** 2
    return places, (1 - 2 * bell) * torch.exp(-bell)


def damping():
    """Return a damping mask near the sides, which prevents reflections from the boundary."""
    inside = torch.ones(SIZE - 6, SIZE - 6)
    return F.avg_pool2d(F.pad(inside, (3, 3, 3, 3), value=0.85)[None, None], 3, 1, 1, count_include_pad=False)


def record(speed, places, wavelet, fade, **how):
    """Return the recorded waves for all sources: (time, source, receiver)."""
    squared = (speed * TIME_STEP) ** 2

    def step(fields, push):
        now, before = fields
        later = (2 * now - before + squared * F.conv2d(now, LAPLACE, padding=1) + places * push) * fade
        heard = later[:, 0, -4, :], later[:, 0, :, 3], later[:, 0, :, -4]
        return (later, now * fade), torch.cat(heard, dim=-1)

    silence = (torch.zeros(SHOTS, 1, SIZE, SIZE), torch.zeros(SHOTS, 1, SIZE, SIZE))
    return retape.scan(step, silence, wavelet, **how)[1]


def speed_of(coarse):
    """Return a smooth map of speeds from a coarse one."""
    return 1.0 + F.interpolate(coarse[None, None], (SIZE, SIZE), mode="bilinear", align_corners=True)[0, 0]


def misfit_of(coarse, heard, **how):
    """Return the misfit of the records, with a small penalty on deviations that regularises areas that no wave crossed."""
    return F.mse_loss(record(speed_of(coarse), *SETTING, **how), heard) * 1e4 + (coarse**2).sum()


SETTING = (*sources(), damping())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", help="where to write the three maps as SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    truth = true_speed()
    with torch.no_grad():
        heard = record(truth, *SETTING)

    coarse = torch.zeros(COARSE, COARSE, requires_grad=True)
    first = misfit_of(coarse, heard, snapshots=6, block=5)
    (by_snapshots,) = torch.autograd.grad(first, coarse)
    (in_one_block,) = torch.autograd.grad(misfit_of(coarse, heard, snapshots=1, block=STEPS), coarse)
    assert torch.equal(by_snapshots, in_one_block)

    optimizer = torch.optim.Adam([coarse], lr=0.03)
    for turn in range(ROUNDS):
        optimizer.zero_grad()
        misfit = misfit_of(coarse, heard, snapshots=6, block=5)
        misfit.backward()
        optimizer.step()
        if turn % 8 == 0:
            print(f"round {turn:2d}: misfit {misfit.item():8.4f}")
    start, speed = torch.ones(SIZE, SIZE), speed_of(coarse.detach())
    error, before = (speed - truth).norm(), (start - truth).norm()
    print(f"error of the map: {before:.3f} at the start, {error:.3f} now")
    if options.picture:
        draw(options.picture, {"the ground": truth, "the start": start, "what was found": speed})
    assert misfit < 0.2 * first
    assert error < 0.65 * before
    print("The lens was found: the misfit fell below a fifth, from gradients through every time step.")


def draw(path, maps):
    """Draw three maps side by side; dark is slow."""
    cell, gap = 8, 24
    width = len(maps) * (SIZE * cell + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{SIZE * cell + 30}" font-family="sans-serif">'
    ]
    for place, (name, values) in enumerate(maps.items()):
        left = place * (SIZE * cell + gap)
        parts.append(f'<text x="{left}" y="16" font-size="14">{name}</text>')
        shades = ((values - 0.7) / 0.35).clamp(0, 1).mul(20).round().mul(12).int().tolist()
        for row, line in enumerate(shades):
            column = 0
            for shade, run in groupby(line):
                length = len(list(run))
                box = f'x="{left + column * cell}" y="{24 + row * cell}" width="{length * cell}" height="{cell}"'
                parts.append(f'<rect {box} fill="rgb({shade},{shade},{shade + 15})"/>')
                column += length
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
