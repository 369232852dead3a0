"""Writes trl_distillation.json: the generalized JSD of TRL 1.16.0 and its gradient.

python record_trl_distillation.py > trl_distillation.json        with trl==1.16.0 installed
"""

import json

import torch
from trl.experimental.gkd import GKDTrainer

CASES = [(beta, temperature) for beta in (0.0, 0.1, 0.5, 0.9, 1.0) for temperature in (1.0, 0.7)]


def main() -> None:
    torch.manual_seed(5)
    cases = []
    for beta, temperature in CASES:
        student = (2 * torch.randn(2, 4, 7)).requires_grad_()
        teacher = 2 * torch.randn(2, 4, 7)
        labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 5, 0]])
        loss = GKDTrainer.generalized_jsd_loss(
            student, teacher, labels=labels, beta=beta, temperature=temperature
        )
        loss.backward()
        cases.append(
            {
                "beta": beta,
                "temperature": temperature,
                "student": student.detach().tolist(),
                "teacher": teacher.tolist(),
                "mask": (labels != -100).tolist(),
                "loss": float(loss),
                "gradient": student.grad.tolist(),
            }
        )
    source = "trl 1.16.0, trl.experimental.gkd.GKDTrainer.generalized_jsd_loss, batchmean"
    print(json.dumps({"source": source, "cases": cases}))  # noqa: T201


if __name__ == "__main__":
    main()
