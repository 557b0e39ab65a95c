// Asks the built site's own search, by its own worker: `node site_search.mjs SITE QUESTION ...` prints a line of pages for each.
import fs from "node:fs"

const [site, ...questions] = process.argv.slice(2)
const folder = `${site}/assets/javascripts/workers/`
let answered
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => {
  globalThis.ask = (data) => new Promise((done) => { answered = done; listener({ data }) })
}
globalThis.postMessage = (message) => answered(message)
new Function(fs.readFileSync(folder + fs.readdirSync(folder).find((name) => name.endsWith(".js")), "utf8"))()
await ask({ type: 0, data: { ...JSON.parse(fs.readFileSync(`${site}/search/search_index.json`)), options: {} } })
for (const question of questions) {
  const found = await ask({ type: 2, data: question })
  console.log(found.data.items.map(([first]) => first.location.split(".html")[0]).join(" "))
}
