"""`python -m eaglekit.cli`, for launchers such as torchrun."""

from eaglekit.cli.main import app

if __name__ == "__main__":
    app()
