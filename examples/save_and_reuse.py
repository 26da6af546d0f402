"""Plan once, keep the plan in a file, and put it on another copy of the model later."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import regrad.torch as rt
from regrad import InfeasibleBudget, Plan, format_bytes


def make_step() -> rt.Step:
    """Eight layers, and a loss that is a function of our own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=8)
    return rt.Step(
        model,
        torch.randn(8, 64, 128),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    )


def main() -> None:
    """Write a plan, read it back, train with it; then ask for the impossible and see what the error knows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        file.write_text(rt.plan(make_step(), budget="50%").to_json(), encoding="utf-8")
        plan = Plan.from_json(file.read_text(encoding="utf-8"))

    step = make_step()
    rt.apply(step.model, plan)
    print("loss", float(step()), "within", format_bytes(plan.budget_bytes))
    rt.remove(step.model)

    try:
        rt.plan(step, budget="1 MiB")
    except InfeasibleBudget as error:
        print("the least is", format_bytes(error.least_bytes), "because of", error.holder)


if __name__ == "__main__":
    main()
