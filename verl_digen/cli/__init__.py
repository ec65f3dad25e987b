"""The ``verl-digen`` command: arguments and tables only; the work is done in the layers below."""
