"""What all tests share: the plugin that makes multi-rank tests fail instead of hanging."""

pytest_plugins = ["mpicoll.pytest_plugin"]
