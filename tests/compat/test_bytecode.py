"""Canaries for what is read from code objects, whose opcodes differ between versions of Python."""

import sys

from retape.torch.compat import bytecode

calls = 0


def code_of(function):
    return function.__code__


def test_names_with_those_of_functions_made_inside():
    def around(a):
        def inside():
            return [len(b.shape) for b in a.grad]

        return inside

    assert bytecode.names_in(code_of(around)) >= {"len", "shape", "grad"}


def test_globals_that_are_read_and_assigned():
    def counts():
        global calls  # noqa: PLW0603
        calls += 1
        return sys

    assert bytecode.globals_in(code_of(counts)) == {"calls", "sys"}


def test_attributes_that_are_bound():
    def binds(self, other):
        self.one = other.two = 1
        del other.three
        self.four += 1
        counts.five += 1

    def counts():
        pass

    assert bytecode.attributes_bound_in(code_of(binds)) == {"one", "two", "three", "four", "five"}
    assert bytecode.attributes_stored_in(code_of(binds)) >= {"two", "five"}
    assert bytecode.globals_with_attributes_stored_in(code_of(lambda: setattr(counts, "five", 1))) == set()


def count_on_itself():
    count_on_itself.calls += 1


def test_a_global_with_an_attribute_that_is_assigned():
    assert bytecode.globals_with_attributes_stored_in(code_of(count_on_itself)) == {"count_on_itself"}


def test_imports():
    def imports():
        import os.path
        from json import loads

        return os, loads

    assert {module.__name__ for module in bytecode.imported_in(code_of(imports), "")} >= {"json"}


def test_variables_of_the_function_around():
    count = 0

    def rebinds():
        nonlocal count
        count += 1

    assert bytecode.rebinds_closure(code_of(rebinds))
    assert not bytecode.rebinds_closure(code_of(lambda: count))
