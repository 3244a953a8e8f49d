"""Pytest plugin that shows the aft_* models to timm's own ``tests/test_models.py`` as native families.

timm's tests choose their models by name while the file is imported, and treat ViTs (tokens instead of maps) by lists
of name and module patterns. A family outside timm is in none of them, so while that file is imported
``timm.list_models`` answers as if the models of ``aft_vit`` stood beside ``vit_*`` and those of ``aft_pyramid`` beside
CPUBone. No test is edited and none is excluded: every aft model must get exactly the tests that a native model of its
family gets, and a skip for any reason but timm's size limits fails the run. ``tests/run_timm_suite.py`` starts it.
"""

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest
import timm

# Our modules, timm's modules that they stand beside, and a model of each.
FAMILIES = {
    'aft_vit': ('vision_transformer', 'vit_tiny_patch16_224'),
    'aft_pyramid': ('cpubone', 'cpubone_b1_bfrobust'),
}
NATIVE_MODELS = [model for _, model in FAMILIES.values()]
MIN_TESTS_PER_MODEL = 10
# Tests of weights, of models that have some.
OF_WEIGHTS = {'test_model_load_pretrained', 'test_model_features_pretrained'}
SIZE_LIMITS = ('Fixed input size model > limit.', 'Skipping FX backward test on model with more than 100M params.')


def to_list(names: str | Iterable[str]) -> list[str]:
    if isinstance(names, str):
        return [names] if names else []
    return list(names)


def list_models_as_native(list_models: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A ``timm.list_models`` that files ``aft_*`` with timm's families and lists nothing else but one of each."""

    def wrapper(
        filter: str | Iterable[str] = '',
        module: str | Iterable[str] = '',
        pretrained: bool = False,
        exclude_filters: str | Iterable[str] = '',
        **kwargs: Any,
    ) -> list[str]:
        include, modules, exclude = to_list(filter), to_list(module), to_list(exclude_filters)
        for patterns in (include, exclude):
            if 'vit_*' in patterns:
                patterns += list_models(module='aft_vit')
        modules += [ours for ours, (native, _) in FAMILIES.items() if native in modules]
        names = list_models(include, modules, pretrained, exclude, **kwargs)
        return [n for n in names if n.startswith('aft_') or (architecture(n) in NATIVE_MODELS and not pretrained)]

    return wrapper


def architecture(model_name: str) -> str:
    return model_name.split('.')[0]


def check_same_tests(tests: dict[str, set[str]], models: list[str]) -> None:
    """Raise UsageError unless each of the models has the tests of its native one and these are a plausible number."""
    for module, (_, native) in FAMILIES.items():
        wanted = tests[native]
        for model in sorted({*models} & {*timm.list_models(module=module)}):
            if len(wanted) < MIN_TESTS_PER_MODEL:
                raise pytest.UsageError(f'expected {MIN_TESTS_PER_MODEL} tests of {native}, collected {sorted(wanted)}')
            found = tests[model] - OF_WEIGHTS
            if found != wanted:
                missing, extra = sorted(wanted - found), sorted(found - wanted)
                raise pytest.UsageError(f'{model} and {native} got different tests: missing {missing}, extra {extra}')


class TimmSuite:
    """Chooses the items of the selected models and counts why any of them skips."""

    def __init__(self, patterns: list[str]) -> None:
        self.models = [n for n in timm.list_models('aft_*') if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
        if not self.models:
            raise pytest.UsageError(f'no registered aft model matches {patterns}: have {timm.list_models("aft_*")}')
        self.skips: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        if collector.name.rpartition('/')[2] != 'test_models.py':
            return (yield)
        list_models = timm.list_models
        timm.list_models = list_models_as_native(list_models)
        try:
            return (yield)
        finally:
            timm.list_models = list_models

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Function]) -> None:
        tests: dict[str, set[str]] = defaultdict(set)
        selected: list[pytest.Function] = []
        deselected: list[pytest.Function] = []
        for item in items:
            params = item.callspec.params if hasattr(item, 'callspec') else {}
            model = architecture(str(params.get('model_name', '')))
            if model.startswith('aft_') or model in NATIVE_MODELS:
                tests[model].add(item.originalname)
            (selected if model in self.models else deselected).append(item)
        check_same_tests(tests, self.models)
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips[reason.removeprefix('Skipped: ')] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and set(self.skips) - set(SIZE_LIMITS):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f'timm {timm.__version__} on {", ".join(self.models)}')
        for reason, count in self.skips.items():
            verdict = 'a size limit of timm' if reason in SIZE_LIMITS else 'NOT a size limit of timm: a failure'
            terminalreporter.write_line(f'{count} skipped, {verdict}: {reason}')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--aft-models', action='append', metavar='PATTERN', help='fnmatch pattern; may be repeated')


def pytest_configure(config: pytest.Config) -> None:
    import aft_vision  # noqa: F401, the import registers the models

    config.pluginmanager.register(TimmSuite(config.getoption('--aft-models') or ['aft_*']))
