"""What mkdocs asks of us while it builds the site: the pages made from the code, and their place in the navigation."""

import pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages into the navigation, before the last entry."""
    assert config.nav is not None
    config.nav.insert(-1, {"Reference": pages.navigation()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the changelog of the repository."""
    for path, text in pages.pages().items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "changelog.md", abs_src_path=str(pages.TABLES.parents[1] / "CHANGELOG.md")))
    return files
