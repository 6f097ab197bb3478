"""What several test files share: waiting, servers, browsers, hostile texts, recorded runs, warm processes."""
