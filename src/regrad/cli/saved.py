"""``regrad saved``: every tensor that autograd keeps after a forward pass, and why."""

from __future__ import annotations

from regrad.cli import names, options
from regrad.cli.output import Answer, answering, progress_bar
from regrad.core.codec import plain
from regrad.report.saved import saved_report


def saved(
    subject: options.Subject,
    batch: options.BatchSize = None,
    sequence: options.SequenceLength = None,
    dtype: options.Dtype = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """List every tensor that autograd keeps after SUBJECT's forward pass: its bytes, who made it, who saved it and why.

    Nothing is trained and nothing is written.
    """
    with answering(Answer("saved", subject, as_json)) as answer:
        settings = options.read_config(config)
        import regrad.torch as rt
        from regrad.torch.subject import Wishes, load_subject

        with progress_bar("building the model") as report:
            step = load_subject(subject, Wishes(batch, sequence, names.dtype(dtype), None, settings))
            answer.device = str(step.device)
            report("running a forward pass", 0.0)
            found = rt.saved(step)
        body = {"activation_bytes": found.activation_bytes, "modules": [plain(total) for total in found.modules]}
        answer.body = {"saved": body | plain(found)}
        answer.shown = [saved_report(found)]
