"""Writes the pages on measurements, in docs/measured/, from the committed results."""

import json
import shutil
from pathlib import Path

from sparsetopk.experiments import EXPERIMENTS, report
from sparsetopk.experiments.drawing import COLOURS, pyplot, save, tidy
from sparsetopk.experiments.runs import mean_and_error
from sparsetopk.experiments.tasks import TASKS, page
from sparsetopk.experiments.tasks.methods import METHODS, THREE

DOCS = Path(__file__).parent
RESULTS, BENCHMARKS, OUT = (
    DOCS / "results",
    DOCS.parent / "benchmarks" / "results",
    DOCS / "measured",
)


def table(rows):
    """Cells to MyST; the first row is the header, the first column is text."""
    head, *body = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ------------------------------------------------------------------------------------- reproduction

OPENING = """# What reproduces

Every claim of the paper that our experiments can judge, in the form that was run here on two cores; the
verdict is computed from the numbers. [How to run them](../reproduce.md). The results are in
`docs/results/` as JSON; `sparsetopk report docs/results` makes one page of them. Other work shared the
cores: errors and accuracies do not depend on it, times do, so take those as a first impression.
"""


BADGES = {
    "reproduced": "bdg-success",
    "partly": "bdg-warning",
    "not reproduced": "bdg-danger",
    "not measured": "bdg-secondary",
}


def badge(claim):
    return f"{{{BADGES[claim.verdict]}}}`{claim.verdict}`"


def reproduction():
    parts = [experiment(name) for name in EXPERIMENTS]
    rows = [
        f"| {claim.text} | [{part.name}](#{part.name}) | {badge(claim)} |"
        for part in parts
        for claim in part.claims
    ]
    summary = "\n".join(["| claim | | verdict |", "|---|---|---|", *rows])
    return "\n\n".join([OPENING, summary, *map(section, parts)]) + "\n"


def experiment(name):
    """The committed result, with its figures drawn beside a copy."""
    there = RESULTS / name / "result.json"
    if there.exists():
        here = OUT / name / "result.json"
        here.parent.mkdir(parents=True, exist_ok=True)
        if not here.exists() or here.read_bytes() != there.read_bytes():
            shutil.copyfile(there, here)
    return report.read(OUT, name)


def section(part):
    lines = [f"({part.name})=\n## {part.title}"]
    if part.result is None:
        return "\n\n".join([*lines, "Not run in full yet."])
    lines += [f"In its {part.form}."]
    for claim in part.claims:
        lines += [f"**{claim.text}.** {badge(claim)}"]
        lines += [f"- Paper: {claim.paper}\n- Here: {claim.ours}"]
        lines += [claim.note]
    for path, caption in part.pictures.items():
        lines += [f"![{caption}]({part.name}/{path.name})", f"*{caption}*"]
    for title, rows in part.tables.items():
        lines += [f"**{title}**", table(rows)]
    return "\n\n".join(lines)


# --------------------------------------------------------------------------------------- benchmarks

SPEED = """# Benchmarks

`make bench` runs them; these are the numbers in `benchmarks/results/`, measured on a two-core machine,
{kernels}, torch {torch}, JAX {jax}. Times are minima, in milliseconds; what to look at are the ratios,
each of which is from one run.

## Against torch.topk

One thread, float32, k of n entries of N(0, 1), lam = 0.1, p = 2. `torch.topk` is called with
`sorted=False`, forward alone; the relaxed mask is shown forward, and forward with backward.
"""


LIMITS = """## What limits them

Measured by scripts on the same machine, while others used its memory: ratios of one run each.

- Two threads: a thread that sleeps takes tens of microseconds to wake, so those of the core look
  for work for a short while before they sleep. The core alone, called again at once, is 1.5 to 1.7
  times as fast forward on two threads (1.4 to 1.7 when they slept) and 1.7 to 2.0 times backward
  (1.4 to 1.7), at 128 x 4,096, 16 x 65,536 and 1 x 1M. Two processes with half of the rows each do
  1.8 to 2.1 times what one does. In torch the rest of a call is on one thread: at 128 x 4,096 a
  third of forward and backward is outside the core, three times as long as on one short row; that
  Python and autograd are not in the caches any more, after all these entries, is the likely reason.
- Backward of one row of a million: to compare all of x and to clear all of dx, and nothing else,
  takes 1.13 copies of x. Its 22,000 entries that have a derivative lie in about a third of the
  cache lines of the cotangent, which must be read as well: by that some 1.3 copies are the least.
- A call on one short row: of 70 microseconds forward and backward, an autograd function that does
  nothing takes 27. Of 11 without a backward the core takes 2.4 with its binding, and allocating the
  output 0.9; most of the rest are checks.
"""


def benchmarks():
    torch, jax, scale, history = (
        json.loads((BENCHMARKS / f"{name}.json").read_text())
        for name in ("torch", "jax", "scale", "before_after")
    )
    draw_shapes(torch["shapes"])
    draw_lengths(torch["lengths"])
    opening = SPEED.format(
        kernels=torch["kernels"], torch=torch["versions"]["torch"], jax=jax["versions"]["jax"]
    )
    parts = [opening, *of_torch(torch), *of_jax(jax), *of_scale(scale), *of_history(history)]
    return "\n\n".join(parts) + "\n"


def shape(run):
    return f"{run['rows']:,} x {run['n']:,}"


def draw_shapes(runs):
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    bars = {"forward": COLOURS["p = 2"], "forward + backward": COLOURS["two-sided"]}
    for i, (name, colour) in enumerate(bars.items()):
        ratios = [run["ms"][name] / run["ms"]["topk"] for run in runs]
        at = [j + 0.38 * (i - 0.5) for j in range(len(runs))]
        ax.barh(at, ratios, 0.36, color=colour, label=name)
    ax.axvline(1.0, color=COLOURS["hard"], lw=1.5)
    ax.text(1.05, -0.6, "torch.topk", color=COLOURS["dense"], fontsize=9)
    ax.set_yticks(range(len(runs)), [f"{shape(run)}, k = {run['k']:,}" for run in runs])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("time, torch.topk forward = 1")
    ax.legend(frameon=False)
    tidy(ax)
    save(figure, OUT, "shapes")


def draw_lengths(runs):
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    for name in runs[0]["ns"]:
        at = [(run["n"], run["ns"][name]) for run in runs if name in run["ns"]]
        ours = name in ("topk_mask", "soft_rank")
        ax.plot(*zip(*at, strict=True), marker="o", ms=3, lw=2.5 if ours else 1.2, label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("n, a tenth of it selected")
    ax.set_ylabel("nanoseconds for each entry")
    ax.legend(frameon=False, ncols=2)
    tidy(ax)
    save(figure, OUT, "lengths")


def of_torch(content):
    rows = [["rows x n", "k", "torch.topk", "x.clone()", "forward", "backward"]]
    rows[0] += [
        "forward / topk",
        "forward + backward / topk",
        "forward / clone",
        "backward / clone",
    ]
    ratios = (
        ("forward", "topk"),
        ("forward + backward", "topk"),
        ("forward", "clone"),
        ("backward", "clone"),
    )
    for run in content["shapes"]:
        ms = run["ms"]
        times = [f"{ms[name]:.3g}" for name in ("topk", "clone", "forward", "backward")]
        over = [f"{ms[name] / ms[other]:.2f}" for name, other in ratios]
        rows.append([shape(run), f"{run['k']:,}", *times, *over])
    names = list(content["operators"][0]["ms"])
    others = [["rows x n", *names]]
    for run in content["operators"]:
        others.append([shape(run), *(f"{run['ms'][n] / run['ms']['p=2']:.2f}" for n in names)])
    inputs = names[names.index("Cauchy") :]
    worst = max(run["ms"][n] / run["ms"]["p=2"] for run in content["operators"] for n in inputs)
    short = {name: 1e3 * ms for name, ms in content["overhead"].items()}
    sizes = list(content["peers"])
    peers = [["forward + backward", *sizes]]
    for name in content["peers"][sizes[0]]:
        peers.append([name, *(f"{content['peers'][size][name]:.3g}" for size in sizes)])
    selected = [["rows x n", "k", *content["selection"][0]["ms"]]]
    for run in content["selection"]:
        selected.append([shape(run), f"{run['k']:,}", *(f"{ms:.3g}" for ms in run["ms"].values())])
    threads = [["rows x n", "k", "forward", "forward + backward"]]
    for run in content["two threads"]:
        ratios = (run["ms"][f"{n}, 1"] / run["ms"][f"{n}, 2"] for n in threads[0][2:])
        threads.append([shape(run), f"{run['k']:,}", *(f"{ratio:.2f}" for ratio in ratios)])
    return [
        "![Time of the relaxed mask over that of torch.topk, by shape](shapes.svg)",
        f"A call on one short row is another matter: of its {short['topk_mask']:.0f} microseconds most "
        f"go into Python and autograd, where `torch.topk` takes {short['torch.topk']:.0f}.",
        table(rows),
        "![Nanoseconds for each entry over the length of rows](lengths.svg)",
        "Forward, in rows of n entries, as many as make a million, or one: from what n on the fixed "
        "part of a call is paid, and where rows leave the caches.",
        "## Other operators and other input",
        "Forward, against the mask with p = 2 on N(0, 1); from Cauchy on the mask on other input, "
        f"of which the slowest takes {worst:.1f} times as long.",
        table(others),
        "## Threads",
        "How many times as fast two threads are as one.",
        table(threads),
        LIMITS,
        "## Selection",
        "`topk_select` against `torch.topk` with a gather, forward, in milliseconds.",
        table(selected),
        "## Against other libraries",
        "Milliseconds, k = 10,000 of 1,000,000 entries and 5 of 1,000.",
        table(peers),
    ]


def of_jax(content):
    rows = [["rows x n", "k", *content["peers"][0]["ms"]]]
    for run in content["peers"]:
        rows.append([shape(run), f"{run['k']:,}", *(f"{ms:.3g}" for ms in run["ms"].values())])
    plain = [["rows x n", "by the core", "in XLA operations"]]
    for run in content["implementations"]:
        plain.append([shape(run), *(f"{run['ms'][name]:.3g}" for name in ("core", "plain"))])
    return [
        "## JAX",
        "Under `jax.jit` on the CPU, against `lax.top_k` and jaxopt's `projection_box_section`; "
        "milliseconds.",
        table(rows),
        "The same operator in plain XLA operations, as accelerators run it, on the CPU:",
        table(plain),
    ]


def of_scale(content):
    many = content["many tensors"]
    clones = many["ms"]["clones"]
    rows = [["", "ms", "of the clones"]]
    rows += [[name, f"{ms:.4g}", f"{ms / clones:.2f}"] for name, ms in many["ms"].items()]
    return [
        "## One top-k over many tensors",
        f"`topk_mag_multi` over {many['n']:,} float32 weights in {many['tensors']} tensors, against "
        "cloning them.",
        table(rows),
        "[Past one process](../scale.md) has the times on many processes, and a model of the cost.",
    ]


def of_history(content):
    rows = [["", "before", "now", "now / before"]]
    for name, ms in content["seconds"].items():
        now, before = 1e3 * ms["now"], 1e3 * ms["before"]
        rows.append([name, f"{before:.4g}", f"{now:.4g}", f"{now / before:.2f}"])
    return [
        "## Since the maths was written once",
        f"`benchmarks/before_after.py`; before is {content['before']}. Milliseconds, {content['runs']}.",
        table(rows),
    ]


# -------------------------------------------------------------------------------------------- tasks

TIMING = ", with nothing else running"
ANNEALED = {
    1.0: " Annealing went on to the last step here, and not to the middle.",
    None: " Nothing was annealed: a loss is not to become hard.",
}
WHY = {  # what is to be known of a task, and why a rival is better where it is
    "indexer-64": "All of the best are at the ceiling. They differ in how many tokens have a gradient.",
    "indexer-256": "The derivative of the relaxed top-4 is 0 as soon as the needle is safely among the "
    "four; that of a softmax, or of the relaxed top-1, goes on until it is first.",
    "indexer-512": "As with 256 tokens, but some seeds fail: two of five with p = 2 and a backward of "
    "k = 1, which has a gradient for 5 tokens, and in part one with the derivative of a softmax. "
    "p = 4/3 lets more tokens compete, and with a backward of k = 1 none of its seeds failed.",
    "patches": "Networks see a third of the resolution; the classifier has learned digits without "
    "clutter first, the same for all. Ours with six settings, all with strength 1, is behind LapSum; "
    "with a larger strength nothing is between them: p = 2 annealed has 61.3 ± 0.9 at 1, 63.8 ± 0.6 at "
    "9.5 and 63.5 ± 0.5 at 30 (10, 18 and 23 patches with a gradient, on average over the training), "
    "p = 4/3 61.4 ± 1.1, 62.5 ± 0.5 and 63.1 ± 0.5 (13, 24 and 33), LapSum, with a gradient for all 49, "
    "63.7 ± 0.5 at 1 and 63.7 ± 0.8 at 9.5; five seeds each. One may guess that it is the number of "
    "patches with a gradient at the start that decides; but strength and number were not varied apart, "
    "and DFTopK, with 15 on average, has 62.9 ± 0.9. What is selected straight through from the start "
    "is a little worse.",
    "pixels-20": "In a first run annealing went on to the last step, and learning rates beside a "
    "strength were 0.003 and 0.01: the hard ramp was at 83.0 ± 0.5 %, the best of ours at "
    "80.4 ± 0.4, ours with six settings at 80.2 ± 0.6 and LapSum at 80.1 ± 0.6 "
    "(`annealed-to-the-end.json`). With annealing that ends in the middle, as the ramp "
    "does, and rates of 0.01 and 0.03, nothing is between them. Which of the two changes "
    "did it has not been separated. Straight through, which selects 20 pixels from the "
    "start, all are worse.",
    "pixels-50": "With more pixels to choose, what is annealed and the hard ramp are as good as each "
    "other; all of it was run after annealing had been made to end in the middle.",
    "neighbours": "Scores are minus squared distances, which nothing holds to a scale. What is annealed "
    "is far behind what selects nine from the start, and most of it was best at large strengths: the "
    "reverse of patches and pixels. Why has not been looked into. The loss is -log of the share of "
    "the label among nine; DFTopK, whose mask need not sum to k, makes it small by selecting more. "
    "Times were taken beside other work: that of two-sided straight-through is chance.",
    "instances": "A network scores 784 pixels of each digit, another sees 20 of them. Straight through "
    "with the derivative of top-20 itself is best; with that of top-1, as with that of a softmax, it is "
    "8 to 14 behind: here each of the 20 counts, and not one among them as for the indexer. What is "
    "annealed was best at the largest strengths that were tried. The best of the others, the budget of "
    "entmax, is our p = 3/2, annealed.",
    "pruning": "A tenth of every matrix of a network 784-32-32-10, for 200 steps; scores are sizes of "
    "weights. The hard ramp and the derivative of a softmax are best; ours with six settings is 1.3 ± "
    "0.8 behind, p = 4/3 and two-sided straight through, with a strength of 3, are within an error. "
    "What is annealed starts with more weights than it ends with, as the ramp does, and is behind it "
    "all the same: why has not been looked into. A longer training is on the page on "
    "[pruning](../pruning.md#what-works).",
    "top-5": "Features are those of ViT-S/14 at 56 pixels, class token and mean of the patches, of "
    "10,000 images to train with, 2,000 for validation and 5,000 to test. Cross-entropy has "
    "a gradient for every class at any distance; a relaxed mask only for classes about lam "
    "from the boundary. So lam has to be of the size of the logits: the top-k losses were "
    "best at lam = 30, the largest that was tried and the default since, and those with "
    "lam = 1, which ours with six settings has, are far behind. Straight through, all are "
    "worse than the masks themselves.",
    "top-5-noisy": "Where one label in 2.5 is wrong, but of the same superclass, a loss that asks for "
    "five classes pays: the top-k losses are the best, and cross-entropy, which is best without "
    "noise, is behind them. Again lam = 30 was best, the largest that was tried, and lam = 1, "
    "which ours with six settings has, is far too small. Validation labels are noisy too: by them "
    "one would have taken p = 4/3 annealed among all forms of ours.",
}

WHICH = """# Which top-k for which task

`sparsetopk tasks NAME --full` trains a small model with every method on a task; `docs/results/task-*`
has what is shown here. A method chooses among six settings on validation data, by one seed: three
strengths (lam, temperature or noise) with two learning rates, or six learning rates where it has no
strength; where the best is at the edge of the strengths, or of the six rates, two more are tried, at
most twice (the two rates beside a strength are never widened). Then it is trained with other seeds,
and tested with exactly k selected: means and standard errors. The budget of entmax with alpha = 1.5 is
our p = 3/2, by another solver. Sinkhorn has 20 iterations, perturbed 20 samples. Trainings are short,
100 to 300 steps of Adam, for all alike: what is compared is what a method reaches in so many steps.

Annealed methods, perturbed, Sinkhorn, LapSum, DFTopK and the budget of entmax among them, go to a
hundredth of their strength in equal ratios. At first they did so until the last step; when pixels-20
had shown that the hard ramp, which ends in the middle, was better than all of them, annealing was made
to end in the middle too, for theirs and ours alike. Where a result is from before, its section says
so.

Nonzeros are counted per row, in masks and in the gradients of the scores, over all of training. Time
of a step and bytes kept for its backward are relative to the hard operator, each in one run{timing}.

**How ours is judged.** Methods in bold are ours. They come in many forms, so the best of them had more
settings to choose from than a rival has. So there is a row *ours with six settings*: three forms
({forms}; on the top-5 tasks the three top-k losses), at strength 1 and with two learning rates, one of
them chosen on the validation data, nothing widened. The forms were named before any result but that of
indexer-256 was seen. It is held against the best of the others by test, which favours the others.
"Within one standard error" is that of the difference. `backward k = 1` was found in pilot runs of the
indexer, with other data.
"""


def tasks():
    found = {
        name: json.loads(there.read_text())
        for name in TASKS
        if (there := RESULTS / f"task-{name}" / "result.json").exists()
    }
    forms = ", ".join(f"*{form}*" for form in THREE)
    parts = [WHICH.format(forms=forms, timing=TIMING), task_summary(found)]
    for name, about in TASKS.items():
        parts.append(f"## {name}: {about}")
        if name not in found:
            parts.append("Not run in full yet.")
            continue
        draw_task(name, found[name]["results"]["methods"])
        settings = found[name]["settings"]
        parts += [
            f"{page.verdict(found[name])} {settings['seeds']} seeds, {settings['steps']} steps."
            + ANNEALED.get(settings["annealed over"], ""),
            *([WHY[name]] if name in WHY else []),
            f"![Quality of the methods](task-{name}.svg)",
            table(page.rows(found[name])),
        ]
    return "\n\n".join(parts) + "\n"


def task_summary(found):
    """Ours beside the best of the others: with six settings, and with all forms to choose from."""
    header = ["task", "best of the others", "%", "ours with six settings", "difference", ""]
    rows = [[*header, "ours, all forms, chosen on validation", "difference", ""]]
    for name, result in found.items():
        rival, methods = page.best_of_others(result), result["results"]["methods"]
        row = [name, rival, page.quality(methods[rival])]
        form = page.chosen_form(result)
        six, one = result["results"]["ours"], methods.get(form)
        for label, run in ((six["form"], six), (form, one)):
            row += (
                [
                    f"{label}: {page.quality(run)}",
                    page.difference(result, run),
                    page.standing(result, run),
                ]
                if run
                else ["not known", "", ""]
            )
        rows.append(row)
    return table(rows)


def draw_task(name, methods):
    figure, ax = pyplot().subplots(figsize=(8, 0.26 * len(methods) + 1), layout="constrained")
    found = {method: mean_and_error(run["quality"]) for method, run in methods.items()}
    order = sorted(found, key=lambda method: found[method][0])
    for i, method in enumerate(order):
        mean, error = found[method]
        colour = COLOURS["p = 2"] if METHODS[method].ours else COLOURS["dense"]
        ax.errorbar(mean, i, xerr=error, fmt="o", color=colour, ms=5)
    ax.set_yticks(range(len(order)), order, fontsize=8)
    ax.set_xlabel("% in use")
    tidy(ax)
    save(figure, OUT, f"task-{name}")


def write(app):
    OUT.mkdir(exist_ok=True)
    pages = {"reproduction": reproduction(), "benchmarks": benchmarks(), "tasks": tasks()}
    for name, content in pages.items():
        path = OUT / f"{name}.md"
        if not path.exists() or path.read_text() != content:  # or Sphinx would read it again
            path.write_text(content)


def setup(app):
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
