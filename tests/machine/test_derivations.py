"""The course's derivations: that the questions, the enumerations and the model answers agree, that
the enumerations are about the project's own functions, and that a bad file costs one line."""

import ast
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import derive
import matrix
from answer_process import arguments, namespace, numbers
from derive import calls_of, check, problem_with, questions, signature
from enumerations import DERIVATIONS
from exercises import source
from grpo import group_advantages, turn_advantages
from matrix import model_answers, wrong_formulas
from ppo import gae, importance_weights, kl_penalty, policy_loss
from surgery import find

ENUMERATE = {
    part.enumerate.__name__: part.enumerate for parts in DERIVATIONS.values() for part in parts
}
MODELS = model_answers()


def first_problem(name, text, seed):
    """What `check` does, without a process: "" or "part K: what is wrong"."""
    names = namespace()
    exec(text, names)
    for call in calls_of(name, seed):
        value = numbers(names[call.function](*arguments(call.inputs.values())))
        problem = problem_with(call, value)
        if problem:
            return f"part {call.number}: {problem}"
    return ""


def close(got, wanted, tolerance=1e-9):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------ the questions


def test_there_are_thirty_points():
    assert list(questions()) == list(DERIVATIONS) == list(MODELS)
    assert len(questions()) >= 8 and sum(q.points for q in questions().values()) == 30
    for name, question in questions().items():
        assert len(question.points_of_parts) == len(DERIVATIONS[name])
        assert sum(question.points_of_parts) == question.points


@pytest.mark.parametrize("name", DERIVATIONS)
def test_a_question_says_what_to_write(name):
    """Its parts have points that add up to its own, the signature of a function each, and lead to
    functions of the project that are there."""
    question = questions()[name]
    text = " ".join(question.text.split())
    points = [int(n) for n in re.findall(r"\((\d) points?\)", text)]
    parts = DERIVATIONS[name]
    assert len(points) == len(parts) + 1 and sum(points[1:]) == points[0] == question.points
    for part in parts:
        assert f"`def {signature(part)}`" in text
    named = re.findall(r"`(\w+\.py):([\w.]+)`", text)
    assert named
    for file, function in named:
        assert find(ast.parse(source(file)), function), (file, function)


@pytest.mark.parametrize("name", DERIVATIONS)
def test_the_points_of_the_model_answer_add_up(name):
    """Every step of a model answer has its points: (1), (1/2)."""
    page = (ROOT / "course" / "teacher" / "derivations.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    steps = re.findall(r"(?<!\w)\((1|1/2)\)\s", section)
    assert sum(0.5 if step == "1/2" else 1 for step in steps) == questions()[name].points


# ------------------------------------------------------------------------- right and wrong formulas


@pytest.mark.parametrize("name", DERIVATIONS)
def test_the_model_answer_agrees(name):
    assert [first_problem(name, MODELS[name], seed) for seed in range(8)] == [""] * 8


@pytest.mark.parametrize("name", DERIVATIONS)
def test_every_wrong_formula_is_refused(name):
    """Whatever the inputs are, so that no student passes by luck; and of every part there is a
    wrong formula."""
    wrong = [(label, text) for derivation, label, text in wrong_formulas() if derivation == name]
    refused_parts = set()
    for label, text in wrong:
        for seed in range(5):
            problem = first_problem(name, text, seed)
            assert problem, (label, seed)
        refused_parts.add(int(re.match(r"part (\d)", problem)[1]))
    assert len(wrong) >= 2 and refused_parts == set(range(1, len(DERIVATIONS[name]) + 1))


OTHER_WAYS = {
    # the number of a micro-batch as an index
    "length-bias": """
def token_weights(lengths, micro):
    sizes = np.bincount(micro, weights=lengths)
    count = len(lengths)
    return [np.full(count, 1 / lengths.sum()), 1 / (count * lengths), 1 / (2 * sizes[micro])]
""",
    # through theta, which is infinite at p = 0 and p = 1
    "baseline": """
def slope(p):
    theta = math.log(p / (1 - p))
    return 1 / (2 + math.exp(theta) + math.exp(-theta))

def with_group_mean(p, r1, r2, n):
    return (n - 1) / n * slope(p) * (r1 - r2)

def variance(p, r1, r2, b):
    return slope(p) * ((1 - p) * r1 + p * r2 - b) ** 2
""",
    "group-std": """
def group_gradient(p, r1, r2, n):
    odds = math.exp(math.log(p / (1 - p)))
    chances = [math.comb(n, k) * odds**k / (1 + odds) ** n for k in range(n + 1)]
    mean = sum(chances[k] * math.sqrt(k * (n - k)) / n for k in range(n + 1))
    return math.copysign(math.sqrt((n - 1) / n) * mean, r1 - r2)
""",
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_another_way_to_the_same_formula_agrees(name):
    text = f"{MODELS[name]}\n{OTHER_WAYS[name]}"
    assert [first_problem(name, text, seed) for seed in range(8)] == [""] * 8


def test_inputs_are_drawn_anew():
    """With the same seed they are the same, as the printed seed promises."""

    def inputs(seed):
        return [str(call) for name in DERIVATIONS for call in calls_of(name, seed)]

    assert inputs(1) == inputs(1)
    assert len(set(inputs(1)) & set(inputs(2))) < len(inputs(1)) / 4


# ----------------------------------------------------- the enumerations and the project's functions


def expected(advantages_of, p, n):
    """The expected gradient of a group of n: a sum over all groups, with the advantages of the
    project. advantages_of: actions [n] of 0 and 1, 1 having the probability p -> advantages [n]."""
    total = 0.0
    for actions in itertools.product((0, 1), repeat=n):
        a = torch.tensor(actions, dtype=torch.float64)
        chance = math.prod(p if x else 1 - p for x in actions)
        total += chance * (advantages_of(a) * (a - p)).mean().item()
    return total


def test_the_groups_are_those_of_grpo():
    """The baseline with oneself in it is `dr-grpo`, the std is that of `grpo`, but for its eps."""
    p, n, one = 0.3, 4, torch.zeros(4, dtype=torch.long)

    def advantages(kind):
        return lambda a: group_advantages(0.2 + 0.5 * a, one, kind)

    close(ENUMERATE["with_group_mean"](p, 0.7, 0.2, n), expected(advantages("dr-grpo"), p, n))
    close(ENUMERATE["group_gradient"](p, 0.7, 0.2, n), expected(advantages("grpo"), p, n), 1e-5)


def test_large_groups_have_the_limit():
    """All outcomes of a group of 60 with three rewards: two percent from the limit, and twice
    as near as a group of 30."""
    pi, r = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.9, 0.3])

    def group(n):
        total = np.zeros(3)
        for i, j in itertools.product(range(n + 1), repeat=2):
            counts = np.array([i, j, n - i - j])
            if i + j > n or counts.max() == n:
                continue
            ways = math.factorial(n) // math.prod(math.factorial(k) for k in counts.tolist())
            advantages = r - (counts * r).sum() / n
            advantages /= np.sqrt((counts * advantages**2).sum() / (n - 1))
            gradient = (counts * advantages) @ (np.eye(3) - pi) / n
            total += ways * np.prod(pi**counts) * gradient
        return total

    limit = ENUMERATE["limit_gradient"](pi, r)
    far, near = (np.abs(group(n) - limit).max() for n in (30, 60))
    assert near < 0.025 * np.abs(limit).max() and 1.7 < far / near < 2.3
    # and the curl is that of the gradient, by finite differences
    logits, h = np.log(pi), 1e-6

    def at(i, step):
        e = np.exp(logits + step * np.eye(3)[i])
        return ENUMERATE["limit_gradient"](e / e.sum(), r)

    jacobian = np.array([(at(i, h) - at(i, -h)) / (2 * h) for i in range(3)])
    close(ENUMERATE["curl"](pi, r), jacobian - jacobian.T, 1e-7)
    assert abs(jacobian - jacobian.T).max() > 0.01


def test_the_talkers_are_those_of_turn_advantages():
    """Turn 2 of `turn_advantages`, where the lone dialogue keeps its return: no factor is lost.
    With the lone one at 0, the factors are those of the enumeration."""
    c, q, n = 0.4, 0.3, 3
    one = torch.zeros(n, dtype=torch.long)
    plays = {(0.3, None): 1 - c, (0.1, 1): c * q, (0.1, 0): c * (1 - q)}
    got = dict.fromkeys(("true", "project", "lone at 0"), 0.0)
    for group in itertools.product(plays, repeat=n):
        rewards = torch.zeros(n, 2, dtype=torch.float64)
        alive = torch.ones(n, 2, dtype=torch.bool)
        for i, (first, action) in enumerate(group):
            alive[i, 1] = action is not None
            rewards[i] = torch.tensor([first, 0.6 if action else -0.2 if action == 0 else 0.0])
        scores = torch.tensor([0.0 if a is None else a - q for _, a in group], dtype=torch.float64)
        advantages = turn_advantages(rewards, alive, one, "rloo")[:, 1]
        chance = math.prod(plays[play] for play in group)
        got["true"] += chance * (rewards[:, 1] * scores).sum().item()
        got["project"] += chance * (advantages * scores).sum().item()
        got["lone at 0"] += chance * (advantages * scores * (alive[:, 1].sum() > 1)).sum().item()
    close(got["project"], got["true"], 1e-6)
    close(got["lone at 0"] / got["true"], ENUMERATE["lone_gets_zero"](c, n)[1], 1e-6)


@pytest.mark.parametrize("advantage", [0.5, -0.5])
@pytest.mark.parametrize("ratio", [0.7, 0.9, 1.1, 1.3])
def test_the_mask_is_that_of_policy_loss(ratio, advantage):
    log_pi = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    a = torch.full((1, 1), advantage, dtype=torch.float64)
    loss, _ = policy_loss(log_pi, torch.zeros_like(log_pi), a, mask, 0.2)
    (slope,) = torch.autograd.grad(-loss, log_pi)
    close(ENUMERATE["clipped_gradient"](ratio, advantage, 0.2), slope.item(), 1e-8)


@pytest.mark.parametrize("p, advantage", [(0.3, 0.5), (0.9, -1.0)])
def test_the_largest_rate_is_where_the_second_step_dies(p, advantage):
    """Two steps with `policy_loss`, a little below the rate and a little above it."""
    mask, a = torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), advantage).double()
    old = torch.full((1, 1), math.log(p), dtype=torch.float64)

    def gradient(theta):
        log_pi = torch.nn.functional.logsigmoid(theta).reshape(1, 1)
        return torch.autograd.grad(-policy_loss(log_pi, old, a, mask, 0.2)[0], theta)[0]

    rate = ENUMERATE["largest_rate"](p, advantage, 0.2)
    for factor, alive in ((0.999, True), (1.001, False)):
        theta = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
        moved = (theta + factor * rate * gradient(theta)).detach().requires_grad_()
        assert (gradient(moved) != 0) == alive


def test_the_estimators_are_those_of_kl_penalty():
    pi, ref = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    logits = torch.tensor(np.log(pi), requires_grad=True)
    for row, kind in enumerate(("k1", "k2", "k3")):
        loss = kl_penalty(logits.log_softmax(0), torch.tensor(ref).log(), kind)
        (wanted,) = torch.autograd.grad((torch.tensor(pi) * loss).sum(), logits)
        close(ENUMERATE["loss_gradients"](pi, ref)[row], wanted.numpy())


def test_the_first_token_is_that_of_gae():
    """Skipped, the user's tokens change nothing; counted, the project's `gae` with a mask of ones
    gives what the enumeration gives."""
    p, r, w, n, m, lam = 0.3, (0.9, 0.1), (0.2, 0.6), 4, 3, 0.8

    def gradient(user_tokens, counted):
        total = 0.0
        for chance, score, reward, value in zip((p, 1 - p), (1 - p, -p), r, w):
            row = [0.5] + [0.0] * user_tokens + [value] * (n - 1)
            values = torch.tensor([row], dtype=torch.float64)
            rewards = torch.zeros_like(values)
            rewards[0, -1] = reward
            mask = torch.ones_like(values, dtype=torch.bool)
            mask[0, 1 : 1 + user_tokens] = counted
            total += chance * score * gae(rewards, values, mask, 1.0, lam)[0][0, 0].item()
        return total

    first, counted = ENUMERATE["first_token"], ENUMERATE["first_token_counted"]
    close(first(p, *r, *w, n, lam), gradient(0, counted=False))
    close(first(p, *r, *w, n, lam), gradient(m, counted=False))
    close(counted(p, *r, *w, n, lam, m), gradient(m, counted=True))


def test_the_weights_are_those_of_the_engine():
    """`importance_weights` truncates at 2; and a plain sum over a fine grid gives the moments."""
    m, x = 1.2, torch.arange(-12, 14, 0.001, dtype=torch.float64)
    w = importance_weights(-((x - m) ** 2) / 2, -(x**2) / 2)
    density = 0.001 * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    mean = (density * w).sum()
    close(ENUMERATE["truncated"](m, 2.0), [mean, (density * (w - mean) ** 2).sum()], 1e-6)
    p, q, scores = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.1, -0.9]], dtype=torch.float64)
    wanted = (q * importance_weights(p.log(), q.log()) * 0.4 * scores).sum()
    close(ENUMERATE["constant_reward"](0.9, 0.3, 0.4, 2.0), wanted)


def test_the_repaired_rewards_hold_for_longer_dialogues():
    """They are solved for from one and two turns; here are five."""
    gamma = 0.9
    constants = []
    for path in ([30, 40, 35, 45, 42, 50], [30, 33, 26, 21, 30, 29], [30, 20, 10]):
        rewards = ENUMERATE["turn_rewards"](np.array(path, dtype=float), gamma)
        total = sum(gamma**t * r for t, r in enumerate(rewards))
        constants.append(total - gamma ** (len(path) - 2) * path[-1] / 100)
    close(constants, [constants[0]] * 3)


# -------------------------------------------------------------------------------------- the command


def written(tmp_path, text):
    path = tmp_path / "answer.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


RIGHT = MODELS["truncation"]
FIRST = "def truncated(m, c):\n    "


@pytest.mark.parametrize(
    "text, code, says",
    [
        (RIGHT, 0, "all 2 parts agree with the enumeration (seed 3)"),
        ("print('x' * 10000)\nimport math, numpy as np\n" + RIGHT, 0, "all 2 parts agree"),
        (RIGHT.replace("c**2", "c"), 1, "part 1, truncated(m="),
        (RIGHT.replace("p * lost_of_2", "lost_of_2"), 1, "part 2, constant_reward(p="),
        (FIRST + "return 1 / 0", 1, "raises ZeroDivisionError: division by zero (seed 3)"),
        (FIRST + "raise ValueError('one\\ntwo\\x1b[2J')", 1, "raises ValueError: one two [2J"),
        (FIRST + "raise SystemExit(0)", 1, "raises SystemExit: 0"),
        (FIRST + "return truncated(m, c)", 1, "raises RecursionError"),
        (FIRST + "return bytes(10**11)", 1, "raises MemoryError"),
        (FIRST + "return [math.nan, 1]", 1, "your answer holds a nan"),
        (FIRST + "return 1", 1, "has the shape (), the enumeration (2,)"),
        (FIRST + "return [[1, 2], [3]]", 1, "lists of different lengths"),
        (FIRST + "return '1'", 1, "returns a str, not a number"),
        (FIRST + "pass", 1, "returns None, not a number"),
        (FIRST + "return 10**400", 1, "returns a whole number that is too large"),
        (FIRST + "return np.zeros(10**6)", 1, "returns 1000000 numbers"),
        ("def truncated(m):\n    return 1", 1, "takes 1 positional argument"),
        ("truncated = 1", 1, "part 1: truncated(m, c) is not in "),
        ("", 1, "part 1: truncated(m, c) is not in "),
        ("1 / 0", 1, "answer.py: raises ZeroDivisionError"),
        (FIRST + "return __import__('os').getcwd()", 1, "imports os; an answer may import math"),
        ("import math\n" + FIRST + "import os.path", 2, "line 3: imports os.path; an answer may"),
        ("from . import derive", 2, "line 1: imports .; an answer may"),
        ("import enumerations", 2, "line 1: imports enumerations; an answer may"),
        (FIRST + "return (", 2, "line 2: '(' was never closed"),
        ("\0", 2, "answer.py: source code string cannot contain null bytes"),
        ("(" * 5000, 2, "answer.py"),
    ],
)
def test_a_file_gets_one_line(text, code, says, tmp_path, capfd):
    assert course.main(["derive", "truncation", written(tmp_path, text), "--seed", "3"]) == code
    out, err = capfd.readouterr()
    line = err if code == 2 else out
    assert says in line and line.count("\n") == 1 and line[:-1].isprintable()
    assert out + err == line and "Traceback" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, says",
    [
        ("while True:\n    pass", "answer.py: no answer within 5 s"),
        (FIRST + "while True: print(m)", "part 1, truncated(m="),
        (RIGHT.replace("    lost_of_1 =", "    while True: pass\n    x ="), "part 2, constant_rew"),
    ],
)
def test_an_endless_loop_ends(text, says):
    """It says in which part, and a part in front of it has been compared."""
    problem = check("truncation", text, "answer.py", seed=3, limit=5.0)
    assert problem.startswith(says) and problem.endswith("no answer within 5 s")
    wrong_before = text.replace("c**2", "c")
    if wrong_before != text:
        assert "the enumeration gives" in check("truncation", wrong_before, "a", seed=3, limit=5.0)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["basline"], "there is no such derivation; there are baseline, group-std"),
        (["baseline", "{missing}"], "cannot be read (No such file or directory)"),
        (["baseline", "{directory}"], "cannot be read (Is a directory)"),
        (["baseline", "{bytes}"], "is not UTF-8 text"),
        (["baseline", "{large}"], "larger than a megabyte"),
        (["baseline", "{missing}", "--csv", "a.csv"], "--csv has the points of --grade"),
        (["--csv", "a.csv"], "--csv has the points of --grade"),
        (["baseline", "{bytes}", "--seed", "-1"], "a whole number from 0"),
    ],
)
def test_bad_input_is_one_line(argv, says, tmp_path, capfd):
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    (tmp_path / "large.py").write_text("#" * 1_000_001)
    paths = {
        "missing": tmp_path / "no.py",
        "directory": tmp_path,
        "bytes": tmp_path / "bytes.py",
        "large": tmp_path / "large.py",
    }
    try:
        code = course.main(["derive", *(word.format(**paths) for word in argv)])
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and says in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_class_is_graded_part_by_part(tmp_path, capsys, monkeypatch):
    """A wrong part costs its own points: in `clip-mask` the first part has 1 of 3 points. A file
    that is not there or cannot be read costs its derivation."""
    three = {name: questions()[name] for name in ("clip-mask", "baseline", "truncation")}
    monkeypatch.setattr(derive, "questions", lambda: three)
    anna, ben = tmp_path / "anna" / "answers", tmp_path / "ben" / "answers"
    for home in (anna, ben):
        home.mkdir(parents=True)
    wrong_in_one = MODELS["clip-mask"].replace("return", "return 1 +", 1)
    (anna / "clip-mask.py").write_text(wrong_in_one)
    (anna / "truncation.py").write_text("import os")
    (anna / "baseline.py").mkdir()
    for name in three:
        (ben / f"{name}.py").write_text(MODELS[name])
    table = str(tmp_path / "points.csv")
    assert course.main(["derive", "--grade", str(anna), str(ben), "--csv", table]) == 1
    out = capsys.readouterr().out
    assert re.search(r"clip-mask +2 of  3   part 1, clipped_gradient\(", out)
    assert re.search(r"baseline +0 of  4   .*cannot be read \(Is a directory\)", out)
    assert "imports os" in out
    (anna / "baseline.py").rmdir()
    assert course.main(["derive", "--grade", str(anna)]) == 1
    assert re.search(r"baseline +0 of  4   no file", capsys.readouterr().out)
    rows = Path(table).read_text(encoding="utf-8").splitlines()
    assert rows[0] == "submission,derivation,points,of,result"
    assert f"{anna},total,2,10,if the algebra is there" in rows
    assert f"{ben},total,10,10,if the algebra is there" in rows
    assert course.main(["derive", "--grade", str(ben)]) == 0
    capsys.readouterr()
    for argv in (["derive", "--grade", "nobody"], ["derive", "baseline", "--grade", str(ben)]):
        assert course.main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_without_a_file_it_lists_and_asks(capsys):
    assert course.main(["derive"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(DERIVATIONS)
    assert course.main(["derive", "clip-mask"]) == 0
    asked = capsys.readouterr().out
    assert asked.startswith("## clip-mask: ") and "## kl-estimators" not in asked


# ------------------------------------------------------------------------- the matrix, and handouts


def test_the_matrix_has_the_derivations(capsys, monkeypatch):
    """A wrong formula that passes is shown; the other one of `--only` is not an exercise."""
    assert course.main(["matrix", "--only", "truncation"]) == 0
    out = capsys.readouterr().out
    assert "1 derivation, 6 wrong answers: only the model answers pass" in out
    lenient = [matrix.Formulas("truncation", "right after all", MODELS["truncation"])]
    monkeypatch.setattr(matrix, "wrong_formulas", lambda: lenient)
    assert course.main(["matrix", "--only", "truncation"]) == 1
    out = capsys.readouterr().out
    assert "NO: right after all" in out and "not as they should be: truncation, right after" in out
    assert course.main(["matrix", "--only", "truncation,gea"]) == 2
    error = capsys.readouterr().err
    assert "there is no exercise or derivation 'gea'; there are reaction" in error
    assert "baseline" in error and error.count("\n") == 1
    assert matrix.choose("clip, clip-mask") == ({"clip": course.exercises()["clip"]}, ["clip-mask"])
    assert matrix.choose(None) == (course.exercises(), list(DERIVATIONS))


def test_without_the_teachers_part_the_matrix_has_one_line(tmp_path, monkeypatch, capsys):
    """As students have the project. It is said before the exercises are tried, for minutes."""
    monkeypatch.setattr(matrix, "HERE", tmp_path)
    for argv in (["matrix"], ["matrix", "--only", "baseline"]):
        assert course.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and "has the model answers; without it name exercises" in err
        assert err.count("\n") == 1


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    """A handout of one exercise."""
    place = tmp_path_factory.mktemp("derivations") / "handout"
    assert course.main(["handout", str(place), "--only", "gae"]) == 0
    return place


def test_a_handout_has_the_questions_and_no_answers(handed_out):
    """The model answers and the wrong ones stay with the teacher."""
    names = {path.name for path in handed_out.rglob("*")}
    assert "derivations.md" in names
    assert not names & {"teacher", "matrix.py", "wrong_derivations.toml", "course"}
    texts = [path.read_text(encoding="utf-8") for path in (handed_out / "derivations").iterdir()]
    lines = {re.sub(r"\s", "", line) for text in texts for line in text.splitlines()}
    for model in MODELS.values():
        for line in model.splitlines():
            squeezed = re.sub(r"\s", "", line)
            is_signature = line.startswith("def ")
            assert is_signature or len(squeezed) < 25 or squeezed not in lines, line


@pytest.mark.slow
def test_the_check_works_in_a_handout(handed_out, tmp_path):
    """There it is derivations/derive.py."""
    answer = written(tmp_path, MODELS["baseline"])
    for name, path, code in (
        ("baseline", answer, 0),
        ("truncation", answer, 1),
        ("baseline", "no.py", 2),
    ):
        command = [sys.executable, "derivations/derive.py", name, path]
        done = subprocess.run(command, cwd=handed_out, capture_output=True, text=True)
        assert done.returncode == code and (done.stdout + done.stderr).count("\n") == 1


def test_the_command_keeps_its_limit():
    """Ten seconds for a file, as README and questions say."""
    assert derive.LIMIT == 10.0
