// What Node makes of URLs: a JSON array of texts comes in, an array of what each is goes out, null for none.
const fs = require('node:fs');

const read = (text) => {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  const { protocol, hostname, port, username, password, hash } = url;
  return { protocol, hostname, port, extra: username + password + hash };
};

const texts = JSON.parse(fs.readFileSync(process.argv[2], 'utf8'));
process.stdout.write(JSON.stringify(texts.map(read)));
